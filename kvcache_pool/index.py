"""The directory's index: which block is in which slot, and who is using it. Pure: time comes in as `now`.

    name ──Replicas──────────> Block, a row of the tables of its segment <── claims of leases
                                 │
                               Slots of a segment: free list, idle blocks in order of eviction, pins

The laws: a slot is free, reserved or cached, never two of them. A name has at most one block in a segment,
and it was committed. A block that a lease names is neither evicted nor given to another. Each use of a slot
has a generation of its own, greater than all before. All costs are O(blocks in the request).

A hot prefix spreads: whoever reads it in a segment that lacks it may ask for slots there, and commits what it
has read under the same names (the end of Mooncake's Algorithm 1, FAST'25, section 6). Such a block is a *copy*
as long as another segment has it too, and a segment gives only a share of its slots to copies, since each of
them takes the place of a block that nobody else has. When the others are gone it is a block like any other.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvcache_pool.api import (
    Acquire,
    Copy,
    Found,
    Grant,
    Lease,
    LeaseLost,
    Note,
    PinKind,
    Place,
    PoolFull,
    SegmentStats,
    Stats,
)
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.counts import stats_of
from kvcache_pool.events import Recorder
from kvcache_pool.leases import QUARANTINE_S, Claim, Leases
from kvcache_pool.lives import Lives
from kvcache_pool.replicas import Replicas, in_segment
from kvcache_pool.rooms import copies_for, rooms_for, with_copies
from kvcache_pool.slots import Block, Shares, Slots
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId

SEGMENT_SILENT_S = 3.0
"""Six announcements missed: the segment is given up. If it was only slow, it joins again, empty."""

GENERATIONS_A_JOIN = 1 << 24
"""How far generations jump when a segment joins: past all that an earlier life of the directory can have granted
and not yet written, should the clock have gone back since. It is 17 ms of that clock: see Index."""


class Index:
    """All blocks of the pool. Every method mutates but `find`, `replicas`, those that count, and `check`."""

    def __init__(
        self,
        copies_share: float = KVCacheConfig.copies_share,
        silent_s: float = SEGMENT_SILENT_S,
        generation: int = 0,
        *,
        hard_pins_share: float = KVCacheConfig.hard_pins_share,
        eviction: str = KVCacheConfig.eviction,
        watermark: float = KVCacheConfig.watermark,
        watermark_step: float = KVCacheConfig.watermark_step,
        recorder: Recorder | None = None,
    ) -> None:
        """Shares are from 0 to 1, of each segment. `eviction` is a key of EVICTIONS. A segment that has not
        announced itself for `silent_s` is given up. `recorder` hears which names come and go."""
        self._silent_s = silent_s
        self._shares = Shares(copies_share, hard_pins_share, eviction, watermark, watermark_step)
        self._segments: dict[SegmentId, Slots] = {}  # in the order of joining, which breaks ties
        self._joined = 0
        self._replicas = Replicas(recorder or Recorder())
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
        self._joined += 1
        joins = self._segments[place.segment] = Slots(self._joined, place, now, self._shares)
        self._replicas.join(joins)
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
            if old and in_segment(slots, self._replicas.of(BlockHash(note.name))) is None:
                good[note.name] = note
        blocks = slots.adopt([*good.values()])
        for block in blocks:
            assert block.name is not None
            self._replicas.add(block.name, block)
            block.touch()
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
        for block in slots.used():
            self._unname(block)
        slots.left = True
        self._replicas.leave(slots)
        del self._segments[slots.place.segment]

    # -- finding ------------------------------------------------------------------------------------

    def find(self, blocks: list[BlockHash]) -> Found:
        """The longest unbroken prefix, in all segments together and in each alone."""
        return self._replicas.find(blocks)

    def replicas(self, name: BlockHash) -> int:
        """How many segments have this block."""
        return self._replicas.count(name)

    # -- leases -------------------------------------------------------------------------------------

    def acquire(self, ask: Acquire, now: float) -> Lease:
        """Lease the cached prefix and room for the rest. Raises PoolFull, or ValueError for a lease's name that is
        taken or a block's that comes twice; then nothing has changed."""
        self.expire(now)
        if ask.lease in self._leases:
            raise ValueError(f"there is a lease {ask.lease} already")
        if len(set(ask.blocks)) < len(ask.blocks):
            raise ValueError("a block is named twice: a prompt's names are a chain, so they all differ")
        near = self._segments.get(ask.near) if ask.near is not None else None
        sources = self._replicas.choose(ask.blocks[: ask.reuse], near)
        count = len(ask.blocks) - len(sources) + ask.unnamed
        if self._leases.full:
            raise PoolFull(f"{len(self._leases)} leases are out, and there may be no more")
        rooms = rooms_for(count, self._segments, ask.near, sources)
        for block in sources:
            block.home.idle.drop(block.slot)
            block.leases += 1
            block.home.count_reading(block.slot)
        targets = [block for slots, share in rooms for block in self._reserve(slots, share)]
        copies = self._copies(ask, near, sources)
        blocks = [*with_copies(sources, copies), *targets]
        committable = [*targets, *copies.values()]
        pairs = [(sources[source], copy) for source, copy in copies.items()]
        self._leases.grant(Claim(ask.lease, ask.owner, now + ask.lease_s, blocks, committable, pairs))
        homes = {block.home: None for block in blocks}
        return Lease(
            ask.lease,
            [block.grant for block in sources],
            [block.grant for block in targets],
            [slots.place for slots in homes],
            [Copy(source, block.grant) for source, block in copies.items()],
        )

    def _copies(self, ask: Acquire, near: Slots | None, sources: list[Block]) -> dict[int, Block]:
        """Room near the asker for sources that are elsewhere; as far as it goes, in their order."""
        if near is None:
            return {}
        copied = copies_for(ask.copies, near, sources)
        return dict(zip(copied, self._reserve(near, len(copied), copy=True), strict=True))

    def due(self, segment: SegmentId, limit: int) -> list[tuple[BlockHash, Grant]]:
        """Blocks of this segment that should be in the other tier too, the first first."""
        return slots.due_blocks(limit) if (slots := self._segments.get(segment)) is not None else []

    def _reserve(self, slots: Slots, count: int, *, copy: bool = False) -> list[Block]:
        """So many slots, of which there is room for all; evicts what it must."""
        for _ in range(count - slots.free):
            self._evict(slots)
        first = self._generation + 1
        self._generation += count
        return [slots.take(generation, copy) for generation in range(first, first + count)]

    def trim(self) -> int:
        """Evict in each segment that is fuller than its watermark what is idle and not pinned, down to so much
        below it, so that whoever comes finds free slots. Returns how many blocks went."""
        before = self._evicted
        for slots in self._segments.values():
            for _ in range(min(slots.excess, slots.idle.unpinned)):
                self._evict(slots)
        return self._evicted - before

    def _evict(self, slots: Slots) -> None:
        self._forget(Block(slots, slots.idle.take()))
        self._evicted += 1

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
        first = in_segment(block.home, self._replicas.of(name))
        if first is None:
            block.name = name
            block.home.cached += 1
            block.home.news.tell(block.grant, name)
            if self._replicas.add(name, block) == 1:
                block.home.keep(block)
        elif first.leases == 0:
            first.touch()

    def renew(self, lease: LeaseId, lease_s: float, now: float) -> None:
        """Extend a lease. Raises LeaseLost."""
        self.expire(now)
        if not self._leases.renew(lease, now + lease_s):
            self._current(lease)

    def release(self, lease: LeaseId, before: int = 0) -> None:
        """End a lease: its named blocks become idle, the others free. One that is gone is no error. `before`
        counts the blocks of the prompt that come before the lease's."""
        claim = self._leases.end(lease)
        if claim is not None:
            self._let_go(claim.blocks, before)
            for source, copy in claim.copies:
                if copy.name is not None:
                    source.home.idle.demote(source.slot)

    def touch(self, prefix: Sequence[BlockHash]) -> None:
        """Count these blocks, in the order of a prompt, as used just now; the first of them last."""
        for depth in range(len(prefix) - 1, -1, -1):
            for block in self._replicas.of(prefix[depth]):
                if block.leases == 0:
                    block.touch(depth)

    def expire(self, now: float) -> list[Claim]:
        """End the pins and leases whose time is over; returns the leases. What was reserved for them is
        quarantined first."""
        for slots in self._segments.values():
            slots.idle.end_pins(now, slots.names)
        overdue = self._leases.overdue(now)
        for claim in overdue:
            self._let_go([block for block in claim.blocks if block.name is not None or block.lost])
            claim.blocks = [block for block in claim.blocks if block.name is None and not block.lost]
            if claim.blocks:  # so there are never more late leases than slots
                self._leases.linger(claim, now + QUARANTINE_S)
        for claim in self._leases.lapsed(now):
            self._let_go(claim.blocks)
        return overdue

    def _let_go(self, blocks: list[Block], before: int = 0) -> None:
        for position in range(len(blocks) - 1, -1, -1):  # the front of a prefix becomes the last to be evicted
            block = blocks[position]
            home, slot = block.home, block.slot
            home.leases[slot] -= 1
            if home.leases[slot] == 0 and not home.left:
                name = home.names[slot]
                if name is not None:
                    home.idle.touch(slot, name, before + position)
                else:
                    home.give(block)

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
            block = slots.at(grant) if slots is not None else None
            if block is None:
                continue  # another use of the slot: what was bad is gone
            known += 1
            block.home.spoiled.add(block.slot)
            self._forget(block)
        return known

    def clear(self) -> int:
        """Forget every block that no lease names. Returns how many."""
        idle = [Block(slots, slot) for slots in self._segments.values() for slot in slots.idle]
        for block in idle:
            self._forget(block)
        return len(idle)

    def remove(self, blocks: Iterable[BlockHash]) -> int:
        """Forget these blocks in every segment but where a lease names them; their pins end in any case. Returns
        how many of them were there and are nowhere now."""
        gone = 0
        for name in blocks:
            replicas = self._replicas.of(name)
            for block in replicas:
                block.home.idle.unpin(block.slot, name)
                if block.leases == 0:
                    self._forget(block)
            gone += bool(replicas) and not self._replicas.count(name)
        return gone

    def _forget(self, block: Block) -> None:
        """It has no name any more, and its slot is free if no lease names it."""
        self._unname(block)
        if block.leases == 0:
            block.home.give(block)

    def _unname(self, block: Block) -> None:
        """Nobody finds this block any more, and it is idle and pinned no more."""
        if block.name is None:
            return
        others = self._replicas.remove(block.name, block)
        if len(others) == 1:
            for last in others:
                last.home.keep(last)
        block.name = None
        block.home.cached -= 1
        block.home.idle.forget(block.slot)
        block.home.news.tell(block.grant, b"")

    # -- pins ---------------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[BlockHash], kind: PinKind, end: float) -> int:
        """Pin one replica of each block of a chain until then. See Replicas.pin."""
        return self._replicas.pin(blocks, kind, end)

    def unpin(self, blocks: Sequence[BlockHash]) -> int:
        """End the pins of these blocks. Returns how many had one."""
        return self._replicas.unpin(blocks)

    # -- counting -----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counts of blocks over all segments."""
        return stats_of(self.segment_stats(), len(self._leases), self._evicted)

    def segment_stats(self) -> list[SegmentStats]:
        """Counts of blocks of each segment, in the order of joining."""
        return [slots.stats() for slots in self._segments.values()]

    def catalogue(self, segment: SegmentId, after: int, limit: int) -> list[Note]:
        """What the slots of a segment hold that come after this one, in their order."""
        return slots.catalogue(after, limit) if (slots := self._segments.get(segment)) is not None else []

    def segments(self) -> list[SegmentId]:
        """Those that are there, in the order of joining."""
        return [*self._segments]

    def named(self) -> Iterator[tuple[BlockHash, Place, Grant]]:
        """Every cached block: its name, its segment, and where it lies there."""
        blocks = ((name, block) for name in self._replicas for block in self._replicas.of(name))
        return ((name, block.home.place, block.grant) for name, block in blocks)

    def check(self) -> None:
        """Asserts every law of this file. O(all blocks)."""
        self._leases.check()
        named = self._replicas.check()
        assert named == sum(slots.cached for slots in self._segments.values())
        counts, used = self._leases.counts(), list[Block]()
        for slots in self._segments.values():
            slots.check()
            used.extend(slots.used())
        assert all(block.leases == counts.get(block, 0) for block in used)
        assert all(block.lost for block in counts.keys() - set(used))
        generations = {block.grant.generation for block in used}
        assert len(generations) == len(used)
        assert max(generations, default=0) <= self._generation
