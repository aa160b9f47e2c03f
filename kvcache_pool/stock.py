"""The stock of blocks: which segments are there, and which names their slots hold. Pure; knows nothing of leases.

    name ──Replicas──> Block, a row of the tables of its segment
                         │
                       Slots of a segment: free list, idle blocks in order of eviction, pins

The laws: a slot is free, reserved or cached, never two of them. A name has at most one block in a segment,
and it was committed; all that have it are one tenant's. Each use of a slot has a generation of its own, greater
than all before.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvcache_pool.api import Found, Grant, Note, PinKind, Place, SegmentStats, TenantStats, WrongTenant
from kvcache_pool.draining import LOOKS_MAX, begin, elsewhere, end, pass_pin, require_drainable, staying
from kvcache_pool.events import Recorder
from kvcache_pool.forgotten import Forgotten
from kvcache_pool.lives import Lives
from kvcache_pool.replicas import Replicas, in_segment
from kvcache_pool.slots import DEFAULT_SHARES, Block, Shares, Slots
from kvcache_pool.tenants import Tenants
from protocol.ids import BlockHash, Incarnation, SegmentId, TenantId

SEGMENT_SILENT_S = 3.0
"""Six announcements missed: the segment is given up. If it was only slow, it joins again, empty."""

GENERATIONS_A_JOIN = 1 << 24
"""How far generations jump when a segment joins: past all that an earlier life of the directory can have granted
and not yet written, should the clock have gone back since. It is 17 ms of that clock."""


class Stock:
    """All blocks of the pool. Every method mutates but those that find, count or check."""

    def __init__(
        self,
        shares: Shares = DEFAULT_SHARES,
        silent_s: float = SEGMENT_SILENT_S,
        generation: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        """`shares` are those of each segment. A segment that has not announced itself for `silent_s` is given up.
        Generations begin after `generation`. `recorder` hears which names come and go."""
        self._shares = shares
        self._silent_s = silent_s
        self._generation = generation
        self._segments: dict[SegmentId, Slots] = {}  # in the order of joining, which breaks ties
        self._joined = 0
        self._replicas = Replicas(recorder or Recorder())
        self._lives = Lives()
        self._tenants = Tenants(shares.tenant)
        self._evicted = 0
        self._forgotten = Forgotten()
        self._uses = 0  # releases of leases and their like, which tell what was used before what

    # -- segments -----------------------------------------------------------------------------------

    def announce(self, place: Place, generation: int, now: float, draining: bool = False) -> bool:
        """A segment is there, and `generation` is the highest it has seen. True if it joins by this; then
        `draining` tells whether it is drained, unless an earlier life of it is known here.

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
        joins = self._segments[place.segment] = Slots(self._joined, place, now, self._shares, self._tenants)
        joins.draining = known.draining if known is not None else draining
        if not joins.draining:
            joins.enlist()
        self._replicas.join(joins)
        self._generation = max(self._generation, generation) + GENERATIONS_A_JOIN
        return True

    def news(self, segment: SegmentId, noted: int) -> tuple[list[Note], int]:
        """What a segment has yet to note down of its slots, after that number; and the number of the last."""
        return self._segments[segment].news.since(noted)

    def told(self) -> list[tuple[Slots, int]]:
        """How far the news of each segment go by now."""
        return [(slots, slots.news.number) for slots in self._segments.values()]

    def adopt(self, segment: SegmentId, incarnation: Incarnation, notes: Sequence[Note]) -> int:
        """A segment that has just joined holds these blocks, the first to be evicted first. Returns how many are
        cached by this: not those whose slot has a new use already, nor a name that the segment has already or
        another tenant elsewhere, nor what was forgotten, of which the segment is told."""
        slots = self._segments.get(segment)
        if slots is None or slots.place.incarnation != incarnation:
            return 0
        good: dict[bytes, Note] = {}
        for note in notes:
            if self._forgotten.covers(note):
                slots.refuse(note)
                continue
            old = 0 < note.generation <= self._generation - GENERATIONS_A_JOIN
            replicas = self._replicas.of(BlockHash(note.name))
            theirs = all(block.tenant == note.tenant for block in replicas)
            if old and theirs and in_segment(slots, replicas) is None:
                good[note.name] = note
        blocks = slots.adopt([*good.values()])
        for block in blocks:
            assert block.name is not None
            self._replicas.add(block.name, block)
            block.touch()
            if slots.draining:
                slots.leave_next(block.slot)
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
        slots.strike()
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

    def due(self, segment: SegmentId, limit: int) -> list[tuple[BlockHash, Grant, TenantId]]:
        """At most so many blocks of this segment that should be in the other tier too, the first first; of a disk,
        no more of one tenant than its quota has room for in memory. Who asks again hears of the others first."""
        slots, told = self._segments.get(segment), []
        rooms: dict[TenantId, int] = {}
        for block in slots.due_blocks(limit) if slots is not None else []:
            name, tenant = block.name, block.tenant
            if block.home.on_disk:
                room = rooms.get(tenant)
                rooms[tenant] = (self._room_of(tenant) if room is None else room) - 1
            if name is not None and rooms.get(tenant, 0) >= 0:
                told.append((name, block.grant, tenant))
        return told

    def _room_of(self, tenant: TenantId) -> int:
        """How many blocks its quota lets it store in memory, if need be in place of its own."""
        return self._tenants.left(tenant) + sum(one.idle.own(tenant) for one in staying(self._segments.values()))

    # -- taking slots -------------------------------------------------------------------------------

    def _reserve(self, slots: Slots, count: int, tenant: TenantId, *, copy: bool = False) -> list[Block]:
        """So many slots, of which there is room for all; evicts what it must."""
        for _ in range(count - slots.free):
            self._evict(slots)
        first = self._generation + 1
        self._generation += count
        return [slots.take(generation, tenant, copy) for generation in range(first, first + count)]

    def trim(self) -> int:
        """Evict in each segment that is fuller than its watermark what is idle and not pinned, down to so much
        below it, so that whoever comes finds free slots. Returns how many blocks went."""
        before = self._evicted
        for slots in self._segments.values():
            for _ in range(0 if slots.draining else min(slots.excess, slots.idle.unpinned)):
                self._evict(slots)
        return self._evicted - before

    def _evict(self, slots: Slots) -> None:
        self._forget(Block(slots, slots.idle.take()))
        self._evicted += 1

    def _evict_own(self, slots: Slots, tenant: TenantId, count: int) -> None:
        """Evict so many of this tenant's, of which there are enough."""
        for _ in range(count):
            self._forget(Block(slots, slots.idle.take_own(tenant)))
        self._evicted += max(count, 0)

    def _publish(self, block: Block, name: BlockHash) -> None:
        if block.lost or block.spoiled or block.name is not None:
            return
        first = in_segment(block.home, self._replicas.of(name))
        if first is None:
            block.name = name
            block.home.cached += 1
            block.home.news.tell(block.grant, name, block.tenant)
            if block.home.draining:
                block.home.leave_next(block.slot)
            if self._replicas.add(name, block) == 1:
                block.home.keep(block)
        elif first.leases == 0:
            first.touch()

    def touch(self, prefix: Sequence[BlockHash]) -> None:
        """Count these blocks, in the order of a prompt, as used just now; the first of them last."""
        tiered = self._replicas.tiered
        self._uses += 1
        for depth in range(len(prefix) - 1, -1, -1):
            for block in self._replicas.of(prefix[depth]):
                block.home.uses[block.slot] = self._uses
                if block.leases == 0:
                    block.touch(depth)
                if tiered and not block.home.on_disk:
                    self._replicas.saved(block)

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
        """Forget every block that no lease names, also those that a segment will bring which is away now. Returns
        how many."""
        self._forgotten.clear(self._generation)
        idle = [Block(slots, slot) for slots in self._segments.values() for slot in slots.idle]
        for block in idle:
            self._forget(block)
        return len(idle)

    def remove(self, blocks: Sequence[BlockHash], tenant: TenantId | None = None) -> int:
        """Forget these blocks in every segment but where a lease names them, also in one that is away now; their
        pins end in any case. Returns how many of them were there and are nowhere now. Raises WrongTenant, and then
        has changed nothing."""
        self._require_tenant(blocks, tenant)
        self._forgotten.remove(blocks, self._generation)
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
        block.home.leaving.pop(block.slot, None)
        block.home.moved.pop(block.slot, None)
        block.home.news.tell(block.grant, b"")

    # -- draining -----------------------------------------------------------------------------------

    def drain(self, segment: SegmentId, *, undo: bool = False) -> int:
        """Begin to empty a segment, or end it. Returns how many blocks it holds. Raises CannotDrain for one that
        is not there, or that no other could take the blocks of."""
        slots = self._segments.get(segment) if undo else None
        slots = slots or require_drainable(segment, self._segments)
        if undo:
            end(slots)
        elif not slots.draining:
            begin(slots)
        return slots.place.slots - slots.free

    def draining(self, segment: SegmentId) -> bool:
        """Whether a segment is drained."""
        return self._segments[segment].draining

    def settle(self) -> int:
        """Forget what has moved, where it was: once nobody reads it there, and its new segment has noted that it
        has it, so that it is found after any death. Returns how many."""
        gone = 0
        for slots in self._segments.values():
            for slot in [*islice(slots.moved, LOOKS_MAX)]:
                del slots.moved[slot]
                gone += self._settle(Block(slots, slot))
        return gone

    def _settle(self, block: Block) -> bool:
        home = block.home
        other = elsewhere(block, self._replicas.named(block))
        if other is None:  # evicted there, or its segment is gone: so it stays here, or must be carried again
            if home.draining:
                home.leave_next(block.slot)
            return False
        if block.leases or other.home.news.is_untold(other.slot) or not pass_pin(block, other):
            home.moved[block.slot] = None  # behind the others
            return False
        self._forget(block)
        return True

    # -- pins ---------------------------------------------------------------------------------------

    def pin(self, blocks: Sequence[BlockHash], kind: PinKind, end: float, tenant: TenantId | None = None) -> int:
        """Pin one replica of each block of a chain until then. See Replicas.pin. Raises WrongTenant, and then has
        changed nothing."""
        self._require_tenant(blocks, tenant)
        return self._replicas.pin(blocks, kind, end)

    def unpin(self, blocks: Sequence[BlockHash], tenant: TenantId | None = None) -> int:
        """End the pins of these blocks. Returns how many had one. Raises WrongTenant as `pin` does."""
        self._require_tenant(blocks, tenant)
        return self._replicas.unpin(blocks)

    def _require_tenant(self, blocks: Iterable[BlockHash], tenant: TenantId | None) -> None:
        """Raises WrongTenant if one of these is cached and not this tenant's; None is everybody's."""
        if tenant is not None:
            for name in blocks:
                if self._replicas.tenant(name) not in (None, tenant):
                    raise WrongTenant(f"block {name[:8].hex()}... is another tenant's")

    # -- counting -----------------------------------------------------------------------------------

    def segment_stats(self) -> list[SegmentStats]:
        """Counts of blocks of each segment, in the order of joining."""
        return [slots.stats() for slots in self._segments.values()]

    def tenant_stats(self, tenant: TenantId) -> TenantStats:
        """How much of memory it has, and may have."""
        return TenantStats(self._tenants.held(tenant), self._tenants.quota(tenant))

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
        assert self._replicas.check() == sum(slots.cached for slots in self._segments.values())
        for slots in self._segments.values():
            slots.check()
        memory = staying(self._segments.values())
        held = Counter(block.tenant for slots in memory for block in slots.used())
        self._tenants.check(sum(slots.place.slots for slots in memory), held)
        generations = [block.grant.generation for block in self._used()]
        assert len(set(generations)) == len(generations)
        assert max(generations, default=0) <= self._generation

    def _used(self) -> Iterator[Block]:
        return (block for slots in self._segments.values() for block in slots.used())
