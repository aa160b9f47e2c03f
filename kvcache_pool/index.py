"""The directory's index: which block is in which slot, and who is using it. Pure: time comes in as `now`.

    name ──> replicas ──> Block(segment, slot, generation) <── claims of leases
                             │
                          Slots of a segment: free list, idle blocks in order of eviction

The laws: a slot is free, reserved or cached, never two of them. A name has at most one block in a segment,
and it was committed. A block that a lease names is neither evicted nor given to another. Each use of a slot
has a generation of its own, greater than all before. All costs are O(blocks in the request).
"""

from collections.abc import Iterable, Sequence

from kvcache_pool.api import Acquire, Found, Grant, Lease, LeaseLost, Place, PoolFull, Stats
from kvcache_pool.leases import QUARANTINE_S, Claim, Leases
from kvcache_pool.slots import Block, Slots
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId

SEGMENT_SILENT_S = 3.0
"""Six announcements missed: the segment is given up. If it was only slow, it joins again, empty."""

GENERATIONS_A_JOIN = 1 << 32
"""How far generations jump when a segment joins: past all that an earlier life of the directory, or of this
segment's membership, can have granted and not yet written. 64 bits hold four billion such jumps."""


class Index:
    """All blocks of the pool. Every method but `find`, `stats` and `check` mutates."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, Slots] = {}  # in the order of joining, which breaks ties
        self._replicas: dict[BlockHash, dict[SegmentId, Block]] = {}
        self._leases = Leases()
        self._generation = 0
        self._evicted = 0

    # -- segments -----------------------------------------------------------------------------------

    def announce(self, place: Place, generation: int, now: float) -> bool:
        """A segment is there, and `generation` is the highest it has seen. True if it joins by this."""
        known = self._segments.get(place.segment)
        if known is not None and known.place == place:
            known.heard = now
            return False
        if known is not None:
            self._drop(known)
        self._segments[place.segment] = Slots(place, now)
        self._generation = max(self._generation, generation) + GENERATIONS_A_JOIN
        return True

    def leave(self, segment: SegmentId, incarnation: Incarnation) -> bool:
        """A segment is gone: its blocks leave the index; leases keep their other blocks."""
        known = self._segments.get(segment)
        if known is None or known.place.incarnation != incarnation:
            return False
        self._drop(known)
        return True

    def silent(self, now: float) -> list[SegmentId]:
        """Drop the segments that have not announced themselves for too long; returns them."""
        gone = [slots for slots in self._segments.values() if slots.heard < now - SEGMENT_SILENT_S]
        for slots in gone:
            self._drop(slots)
        return [slots.place.segment for slots in gone]

    def _drop(self, slots: Slots) -> None:
        for block in slots.used.values():
            self._unname(block)
            block.lost = True
        del self._segments[slots.place.segment]

    # -- finding ------------------------------------------------------------------------------------

    def find(self, blocks: list[BlockHash]) -> Found:
        """The longest unbroken prefix, in all segments together and in each alone."""
        held = dict.fromkeys(self._replicas.get(blocks[0], ()) if blocks else (), 0)
        unbroken, reach = list(held), 0
        for name in blocks:
            replicas = self._replicas.get(name)
            if replicas is None:
                break
            reach += 1
            unbroken = [segment for segment in unbroken if segment in replicas]
            for segment in unbroken:
                held[segment] = reach
        return Found(reach, {str(segment): count for segment, count in held.items()})

    def _cached(self, blocks: list[BlockHash], near: SegmentId | None) -> list[Block]:
        """One replica of each block of the cached prefix: near, else where the one before was, else the oldest."""
        chosen: list[Block] = []
        last = near
        for name in blocks:
            replicas = self._replicas.get(name)
            if replicas is None:
                break
            segment = next((wish for wish in (near, last) if wish in replicas), next(iter(replicas)))
            assert segment is not None
            chosen.append(replicas[segment])
            last = segment
        return chosen

    # -- leases -------------------------------------------------------------------------------------

    def acquire(self, ask: Acquire, now: float) -> Lease:
        """Lease the cached prefix and room for the rest. Raises PoolFull, or ValueError for a name that is
        taken; then nothing has changed."""
        self.expire(now)
        if ask.lease in self._leases:
            raise ValueError(f"there is a lease {ask.lease} already")
        sources = self._cached(ask.blocks[: ask.reuse], ask.near)
        count = len(ask.blocks) - len(sources) + ask.unnamed
        rooms = self._rooms(count, ask.near, sources)
        for block in sources:
            block.leases += 1
            block.home.idle.drop(block)
        targets = [self._reserve(slots) for slots, share in rooms for _ in range(share)]
        claim = self._leases.grant(ask.lease, ask.owner, now + ask.lease_s, sources, targets)
        places = {block.home.place.segment: block.home.place for block in claim.blocks}
        return Lease(
            claim.lease,
            [block.grant() for block in sources],
            [block.grant() for block in targets],
            list(places.values()),
        )

    def _rooms(self, count: int, near: SegmentId | None, sources: list[Block]) -> list[tuple[Slots, int]]:
        """Which segments give how many slots: one if it can, the near one first. Raises PoolFull."""
        spare = {segment: slots.room for segment, slots in self._segments.items()}
        for block in sources:
            if block in block.home.idle:
                spare[block.home.place.segment] -= 1  # about to be leased, so not to be evicted
        if sum(spare.values()) < count or self._leases.full:
            raise PoolFull(f"{count} blocks wanted, {sum(spare.values())} can be had")
        order = sorted(spare, key=lambda s: (s != near, -self._segments[s].free, -spare[s]))
        for segment in order:
            if spare[segment] >= count:
                return [(self._segments[segment], count)]
        shares = []
        for segment in order:
            share = min(count, spare[segment])
            shares.append((self._segments[segment], share))
            count -= share
        return shares

    def _reserve(self, slots: Slots) -> Block:
        if not slots.free:
            victim = slots.idle.take()
            self._unname(victim)
            slots.give(victim)
            self._evicted += 1
        self._generation += 1
        return slots.take(self._generation)

    def commit(self, lease: LeaseId, targets: list[int], blocks: list[BlockHash], now: float) -> None:
        """Publish written targets. Raises LeaseLost, or ValueError if these targets were never granted.

        A name that its segment has already is not given twice: the later copy stays private.
        """
        self.expire(now)
        claim = self._current(lease)
        if len(targets) != len(blocks) or not all(0 <= target < len(claim.targets) for target in targets):
            raise ValueError(f"{lease} has {len(claim.targets)} targets")
        for target, name in zip(reversed(targets), reversed(blocks), strict=True):
            self._publish(claim.targets[target], name)

    def _publish(self, block: Block, name: BlockHash) -> None:
        if block.lost or block.spoiled or block.name is not None:
            return
        replicas = self._replicas.setdefault(name, {})
        first = replicas.setdefault(block.home.place.segment, block)
        if first is block:
            block.name = name
            block.home.cached += 1
        elif first.leases == 0:
            first.home.idle.touch(first)

    def renew(self, lease: LeaseId, lease_s: float, now: float) -> None:
        """Extend a lease. Raises LeaseLost."""
        self.expire(now)
        if not self._leases.renew(lease, now + lease_s):
            self._current(lease)

    def release(self, lease: LeaseId) -> None:
        """End a lease: its named blocks become idle, the others free. One that is gone is no error."""
        claim = self._leases.end(lease)
        if claim is not None:
            self._let_go(claim.blocks)

    def touch(self, prefix: Sequence[BlockHash]) -> None:
        """Count these blocks, in the order of a prompt, as used just now; the first of them last."""
        for name in reversed(prefix):
            for block in self._replicas.get(name, {}).values():
                if block.leases == 0:
                    block.home.idle.touch(block)

    def expire(self, now: float) -> list[Claim]:
        """End the leases whose time is over; returns them. What was reserved for them is quarantined first."""
        overdue = self._leases.overdue(now)
        for claim in overdue:
            self._let_go([block for block in claim.blocks if block.name is not None or block.lost])
            claim.sources = [block for block in claim.sources if block.name is None and not block.lost]
            claim.targets = [block for block in claim.targets if block.name is None and not block.lost]
            self._leases.linger(claim, now + QUARANTINE_S)
        for claim in self._leases.lapsed(now):
            self._let_go(claim.blocks)
        return overdue

    def _let_go(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):  # the front of a prefix becomes the last to be evicted
            block.leases -= 1
            if block.leases == 0 and not block.lost:
                if block.name is not None:
                    block.home.idle.touch(block)
                else:
                    block.home.give(block)

    def _current(self, lease: LeaseId) -> Claim:
        claim = self._leases.find(lease)
        if claim is None:
            raise LeaseLost(f"the lease {lease[:80]} has ended")
        return claim

    # -- forgetting ---------------------------------------------------------------------------------

    def discard(self, grants: Iterable[Grant]) -> int:
        """Forget blocks that a reader found bad; they are freed when no lease names them. Returns how many."""
        known = 0
        for grant in grants:
            slots = self._segments.get(grant.segment)
            block = slots.used.get(grant.slot) if slots is not None else None
            if block is None or block.generation != grant.generation:
                continue  # another use of the slot: what was bad is gone
            known += 1
            block.spoiled = True
            self._free_if_idle(block)
        return known

    def clear(self) -> int:
        """Forget every block that no lease names. Returns how many."""
        idle = [block for slots in self._segments.values() for block in slots.idle]
        for block in idle:
            self._free_if_idle(block)
        return len(idle)

    def _free_if_idle(self, block: Block) -> None:
        self._unname(block)
        if block.leases == 0:
            block.home.give(block)

    def _unname(self, block: Block) -> None:
        """Nobody finds this block any more."""
        block.home.idle.drop(block)
        if block.name is None:
            return
        replicas = self._replicas[block.name]
        del replicas[block.home.place.segment]
        if not replicas:
            del self._replicas[block.name]
        block.name = None
        block.home.cached -= 1

    # -- counting -----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counts of blocks over all segments."""
        segments = self._segments.values()
        total = sum(slots.place.slots for slots in segments)
        free = sum(slots.free for slots in segments)
        cached = sum(slots.cached for slots in segments)
        leased = cached - sum(len(slots.idle) for slots in segments)
        return Stats(total, free, cached, total - free - cached, leased, len(self._leases), self._evicted)

    def check(self) -> None:
        """Asserts every law of this file. O(all blocks)."""
        self._leases.check()
        named = 0
        for slots in self._segments.values():
            slots.check()
            for block in slots.used.values():
                assert not block.lost
                assert block.generation <= self._generation
        for name, replicas in self._replicas.items():
            assert replicas, "a name without a block"
            for segment, block in replicas.items():
                assert self._segments[segment].used[block.slot] is block
                assert block.name == name
                assert not block.spoiled
                named += 1
        assert named == sum(slots.cached for slots in self._segments.values())
        counts = self._leases.counts()
        used = [block for slots in self._segments.values() for block in slots.used.values()]
        assert all(block.leases == counts.get(block, 0) for block in used)
        assert all(block.lost for block in counts.keys() - set(used))
        assert len({block.generation for block in used}) == len(used)
