"""The directory's index: which block is in which slot, and who is using it. Pure: time comes in as `now`.

    name ──> replicas ──> Block(segment, slot, generation) <── claims of leases
                             │
                          Slots of a segment: free list, idle blocks in order of eviction

The laws: a slot is free, reserved or cached, never two of them. A name has at most one block in a segment,
and it was committed. A block that a lease names is neither evicted nor given to another. Each use of a slot
has a generation of its own, greater than all before. All costs are O(blocks in the request).

A hot prefix spreads: whoever reads it in a segment that lacks it may ask for slots there, and commits what it
has read under the same names (the end of Mooncake's Algorithm 1, FAST'25, section 6). Such a block is a *copy*
as long as another segment has it too, and a segment gives only a share of its slots to copies, since each of
them takes the place of a block that nobody else has. When the others are gone it is a block like any other.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvcache_pool.api import Acquire, Copy, Found, Grant, Lease, LeaseLost, Note, Place, PoolFull, Stats
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.leases import QUARANTINE_S, Claim, Leases
from kvcache_pool.lives import Lives
from kvcache_pool.slots import Block, Slots
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId

SEGMENT_SILENT_S = 3.0
"""Six announcements missed: the segment is given up. If it was only slow, it joins again, empty."""

GENERATIONS_A_JOIN = 1 << 24
"""How far generations jump when a segment joins: past all that an earlier life of the directory can have granted
and not yet written, should the clock have gone back since. It is 17 ms of that clock: see Index."""


class Index:
    """All blocks of the pool. Every method but `find`, `replicas`, `stats` and `check` mutates."""

    def __init__(
        self,
        copies_share: float = KVCacheConfig.copies_share,
        silent_s: float = SEGMENT_SILENT_S,
        generation: int = 0,
    ) -> None:
        """`copies_share`, from 0 to 1, is how much of a segment may hold copies. A segment that has not announced
        itself for `silent_s` is given up. `generation` is where generations begin. Those who hold grants may
        outlive a directory and all its segments, so it is told the wall clock's nanoseconds: each life then begins
        above all that the one before has granted, which is far less than one for each nanosecond."""
        self._silent_s = silent_s
        self._copies_share = copies_share
        self._segments: dict[SegmentId, Slots] = {}  # in the order of joining, which breaks ties
        self._replicas: dict[BlockHash, dict[SegmentId, Block]] = {}
        self._lives = Lives()
        self._leases = Leases()
        self._generation = generation
        self._evicted = 0

    # -- segments -----------------------------------------------------------------------------------

    def announce(self, place: Place, generation: int, now: float) -> bool:
        """A segment is there, and `generation` is the highest it has seen. True if it joins by this.

        Raises ValueError for one that cannot join beside the others, or that a newer life has replaced.
        """
        known = self._segments.get(place.segment)
        if known is not None and known.place == place:
            known.heard = now
            return False
        self._lives.join(place, [slots.place for name, slots in self._segments.items() if name != place.segment])
        if known is not None:
            self._drop(known)
        self._segments[place.segment] = Slots(place, now, int(self._copies_share * place.slots))
        self._generation = max(self._generation, generation) + GENERATIONS_A_JOIN
        return True

    def news(self, segment: SegmentId, noted: int) -> tuple[list[Note], int]:
        """What a segment has yet to note down of its slots, after that number; and the number of the last."""
        return self._segments[segment].news.since(noted)

    def adopt(self, segment: SegmentId, incarnation: Incarnation, notes: Sequence[Note]) -> int:
        """A segment that has just joined holds these blocks, the first to be evicted first. Returns how many are
        cached by this: not those whose slot has a new use already, nor a name that the segment has already."""
        slots = self._segments.get(segment)
        if slots is None or slots.place.incarnation != incarnation:
            return 0
        good: dict[bytes, Note] = {}
        for note in notes:
            old = 0 < note.generation <= self._generation - GENERATIONS_A_JOIN
            if old and segment not in self._replicas.get(BlockHash(note.name), ()):
                good[note.name] = note
        blocks = slots.adopt([*good.values()])
        for block in blocks:
            assert block.name is not None
            self._replicas.setdefault(block.name, {})[segment] = block
            slots.idle.touch(block)
        return len(blocks)

    def leave(self, segment: SegmentId, incarnation: Incarnation) -> bool:
        """A segment is gone: its blocks leave the index; leases keep their other blocks."""
        known = self._segments.get(segment)
        if known is None or known.place.incarnation != incarnation:
            return False
        self._drop(known)
        return True

    def silent(self, now: float) -> list[SegmentId]:
        """Drop the segments that have not announced themselves for too long; returns them."""
        gone = [slots for slots in self._segments.values() if slots.heard < now - self._silent_s]
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
        unbroken, reach = set(held), 0
        for name in blocks:
            replicas = self._replicas.get(name)
            if replicas is None:
                break
            if not unbroken <= replicas.keys():
                for segment in unbroken - replicas.keys():
                    held[segment] = reach
                unbroken &= replicas.keys()
            reach += 1
        for segment in unbroken:
            held[segment] = reach
        return Found(reach, {str(segment): count for segment, count in held.items()})

    def replicas(self, name: BlockHash) -> int:
        """How many segments have this block."""
        return len(self._replicas.get(name, ()))

    def _cached(self, blocks: list[BlockHash], near: SegmentId | None) -> list[Block]:
        """One replica of each block of the cached prefix: near, else where the one before was, else the oldest."""
        chosen: list[Block] = []
        home = last = near or SegmentId("")
        for name in blocks:
            replicas = self._replicas.get(name)
            if replicas is None:
                break
            block = replicas.get(home) or replicas.get(last) or next(iter(replicas.values()))
            chosen.append(block)
            last = block.grant.segment
        return chosen

    # -- leases -------------------------------------------------------------------------------------

    def acquire(self, ask: Acquire, now: float) -> Lease:
        """Lease the cached prefix and room for the rest. Raises PoolFull, or ValueError for a lease's name that is
        taken or a block's that comes twice; then nothing has changed."""
        self.expire(now)
        if ask.lease in self._leases:
            raise ValueError(f"there is a lease {ask.lease} already")
        if len(set(ask.blocks)) < len(ask.blocks):
            raise ValueError("a block is named twice: a prompt's names are a chain, so they all differ")
        sources = self._cached(ask.blocks[: ask.reuse], ask.near)
        count = len(ask.blocks) - len(sources) + ask.unnamed
        rooms = self._rooms(count, ask.near, sources)
        for block in sources:
            if block.leases == 0:
                block.home.idle.drop(block)
            block.leases += 1
        targets = [block for slots, share in rooms for block in self._reserve(slots, share)]
        copies = self._copies(ask, sources)
        blocks = [*_with_copies(sources, copies), *targets]
        committable = [*targets, *copies.values()]
        pairs = [(sources[source], block) for source, block in copies.items()]
        self._leases.grant(Claim(ask.lease, ask.owner, now + ask.lease_s, blocks, committable, pairs))
        homes = {block.home: None for block in blocks}
        return Lease(
            ask.lease,
            [block.grant for block in sources],
            [block.grant for block in targets],
            [slots.place for slots in homes],
            [Copy(source, block.grant) for source, block in copies.items()],
        )

    def _rooms(self, count: int, near: SegmentId | None, sources: list[Block]) -> list[tuple[Slots, int]]:
        """Which segments give how many slots: one if it can, the near one first. Raises PoolFull."""
        spare = {segment: slots.room for segment, slots in self._segments.items()}
        for block in sources:
            if block.leases == 0:
                spare[block.home.place.segment] -= 1  # about to be leased, so not to be evicted
        if self._leases.full:
            raise PoolFull(f"{len(self._leases)} leases are out, and there may be no more")
        if sum(spare.values()) < count:
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

    def _copies(self, ask: Acquire, sources: list[Block]) -> dict[int, Block]:
        """Room near the asker for copies of the sources that are elsewhere; as far as it goes, in their order."""
        slots = self._segments.get(ask.near) if ask.near is not None and ask.copies else None
        if slots is None:
            return {}
        elsewhere = [source for source, block in enumerate(sources) if block.home is not slots]
        count = min(ask.copies, len(elsewhere), slots.copies_room)
        return dict(zip(elsewhere, self._reserve(slots, count, copy=True), strict=False))

    def _reserve(self, slots: Slots, count: int, *, copy: bool = False) -> list[Block]:
        """So many slots, of which there is room for all; evicts what it must."""
        for _ in range(count - slots.free):
            victim = slots.idle.take()
            self._unname(victim)
            slots.give(victim)
            self._evicted += 1
        first = self._generation + 1
        self._generation += count
        return [slots.take(generation, copy) for generation in range(first, first + count)]

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
        first = replicas.setdefault(block.grant.segment, block)
        if first is block:
            block.name = name
            block.home.cached += 1
            block.home.news.tell(block.grant, name)
            if block.copy and len(replicas) == 1:
                block.home.keep(block)
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
            for source, copy in claim.copies:
                if copy.name is not None:
                    source.home.idle.demote(source)

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
            claim.blocks = [block for block in claim.blocks if block.name is None and not block.lost]
            if claim.blocks:  # so there are never more late leases than slots
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
            if block is None or block.grant != grant:
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
        block.home.idle.drop(block)
        self._unname(block)
        if block.leases == 0:
            block.home.give(block)

    def _unname(self, block: Block) -> None:
        """Nobody finds this block any more. That it is idle no more is for the caller to see to."""
        if block.name is None:
            return
        replicas = self._replicas[block.name]
        del replicas[block.grant.segment]
        if not replicas:
            del self._replicas[block.name]
        elif len(replicas) == 1:
            for last in replicas.values():
                last.home.keep(last)
        block.name = None
        block.home.cached -= 1
        block.home.news.tell(block.grant, b"")

    # -- counting -----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counts of blocks over all segments."""
        segments = self._segments.values()
        total = sum(slots.place.slots for slots in segments)
        free = sum(slots.free for slots in segments)
        cached = sum(slots.cached for slots in segments)
        leased = cached - sum(len(slots.idle) for slots in segments)
        copies = sum(slots.copies for slots in segments)
        reserved = total - free - cached
        return Stats(total, free, cached, reserved, leased, len(self._leases), self._evicted, copies)

    def segments(self) -> list[SegmentId]:
        """Those that are there, in the order of joining."""
        return list(self._segments)

    def named(self) -> Iterator[tuple[BlockHash, Place, Grant]]:
        """Every cached block: its name, its segment, and where it lies there."""
        for name, replicas in self._replicas.items():
            for block in replicas.values():
                yield name, block.home.place, block.grant

    def check(self) -> None:
        """Asserts every law of this file. O(all blocks)."""
        self._leases.check()
        named = 0
        for slots in self._segments.values():
            slots.check()
            for block in slots.used.values():
                assert not block.lost
                assert block.grant.generation <= self._generation
        for name, replicas in self._replicas.items():
            assert replicas, "a name without a block"
            for segment, block in replicas.items():
                assert self._segments[segment].used[block.grant.slot] is block
                assert block.name == name
                assert len(replicas) > 1 or not block.copy, "what is nowhere else is no copy"
                assert not block.spoiled
                named += 1
        assert named == sum(slots.cached for slots in self._segments.values())
        counts = self._leases.counts()
        used = [block for slots in self._segments.values() for block in slots.used.values()]
        assert all(block.leases == counts.get(block, 0) for block in used)
        assert all(block.lost for block in counts.keys() - set(used))
        assert len({block.grant.generation for block in used}) == len(used)


def _with_copies(sources: list[Block], copies: dict[int, Block]) -> list[Block]:
    """Each source with its copy, so that both are used, and one day evicted, in the order of the prompt."""
    if not copies:
        return sources
    return [block for n, source in enumerate(sources) for block in (source, copies.get(n)) if block is not None]
