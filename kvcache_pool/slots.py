"""The slots of one segment: which are free, and what the others hold. Pure.

A pool may have millions of blocks, so what is known of each lies in tables with a row a slot, about 40 bytes. A
`Block` is only how one speaks of such a row.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvcache_pool.api import Grant, Note, Place, SegmentStats, Tier
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.eviction import EVICTIONS
from kvcache_pool.idle import Idle
from kvcache_pool.names import where
from kvcache_pool.news import News
from kvcache_pool.owned import Owned
from kvcache_pool.tenants import Tenants
from protocol.ids import NO_TENANT, BlockHash, TenantId


@dataclass(unsafe_hash=True, slots=True)
class Block:
    """A slot in use: *cached* if it has a name, else *reserved*. Made at need; equal to all that speak of this
    slot in this life of its segment, so it is to be kept only as long as a lease names the block."""

    home: "Slots"
    slot: int

    @property
    def grant(self) -> Grant:
        """The right to this use of the slot, as readers and writers are told. Its generation was never seen
        before in any slot, so an old grant is recognised."""
        return Grant(self.home.place.segment, self.slot, self.home.generations[self.slot])

    @property
    def where(self) -> int:
        """The slot among those of all segments: see names.py."""
        return where(self.home.number, self.slot)

    @property
    def name(self) -> BlockHash | None:
        """Of what it holds; None while it is reserved."""
        return self.home.names[self.slot]

    @name.setter
    def name(self, name: BlockHash | None) -> None:
        self.home.names[self.slot] = name

    @property
    def tenant(self) -> TenantId:
        """Whose it is."""
        return TenantId(self.home.tenants[self.slot])

    @property
    def leases(self) -> int:
        """How many leases name it."""
        return self.home.leases[self.slot]

    @leases.setter
    def leases(self, leases: int) -> None:
        self.home.leases[self.slot] = leases

    @property
    def copy(self) -> bool:
        """Made as a copy of what another segment has, which is so still: it counts against the budget of
        copies."""
        return self.slot in self.home.copy_slots

    @property
    def spoiled(self) -> bool:
        """A reader found it bad: it is never published (again)."""
        return self.slot in self.home.spoiled

    @property
    def lost(self) -> bool:
        """Its segment has left; only leases remember it."""
        return self.home.left

    def touch(self, depth: int | None = None) -> None:
        """It has been used, and no lease names it: see Order."""
        name = self.name
        assert name is not None, "what is idle has a name"
        self.home.idle.touch(self.slot, name, depth)


@dataclass(frozen=True)
class Shares:
    """How the slots of each segment may be used."""

    copies: float = KVCacheConfig.copies_share
    """At most this share may hold copies, from 0 to 1."""
    hard_pins: float = KVCacheConfig.hard_pins_share
    """At most this share may be pinned hard."""
    eviction: str = KVCacheConfig.eviction
    """A key of EVICTIONS."""
    watermark: float = KVCacheConfig.watermark
    """When a greater share is in use, some is evicted before it is wanted; 1 turns that off."""
    watermark_step: float = KVCacheConfig.watermark_step
    """How far below the watermark the use then comes."""
    tenant: float = KVCacheConfig.tenant_share
    """At most this share of the memory of all segments may hold one tenant's blocks; 1 sets no bound."""


DEFAULT_SHARES = Shares()


class Slots:
    """One segment's slots.

    Owns its free list and the tables of the blocks in the other slots. Always: free + used == place.slots, `idle`
    holds exactly the cached blocks that no lease names, and at most `copies_max` blocks are copies. Mutates: take,
    adopt, give, keep, enlist, strike; and who sets what a Block has.
    """

    def __init__(self, number: int, place: Place, heard: float, shares: Shares, counted: Tenants) -> None:
        """`number` is unlike that of any other segment that was ever there. `counted` hears what it holds while it
        is enlisted, which at first it is not."""
        count = place.slots
        self.number = number
        self.place = place
        self.heard = heard
        """When it last announced itself."""
        self.left = False
        """Whether it is gone."""
        self.copies_max = int(shares.copies * count)
        """The budget: so many slots may hold copies."""
        self._watermark = shares.watermark * count
        self._trimmed = int((shares.watermark - shares.watermark_step) * count)
        self.cached = 0
        """Blocks with a name."""
        self.tenants = array("Q", bytes(8 * count))
        self._counted, self._enlisted = counted, False
        owned = Owned(self.tenants) if counted.bounded and not self.on_disk else None
        self.idle = Idle(EVICTIONS[shares.eviction](count), int(shares.hard_pins * count), owned)
        self.names: list[BlockHash | None] = [None] * count
        self.generations = array("Q", bytes(8 * count))  # 0 is a free slot
        self.leases = array("I", bytes(4 * count))
        self.copy_slots: set[int] = set()
        self.spoiled: set[int] = set()
        self.due: dict[int, None] = {}
        """Slots whose blocks should be in the other tier too, the first that were so first. In memory: those that
        no disk has, while there is one. On a disk: those that were read twice and that no memory has."""
        self.read: set[int] = set()
        """Slots on a disk that have been read once."""
        self.draining = False
        """Whether it gives no slots, and all that it has leaves: see draining.py."""
        self.leaving: OrderedDict[int, None] = OrderedDict()
        """Slots of a segment that is drained whose blocks are to be carried elsewhere, the first first."""
        self.moved: dict[int, None] = {}
        """Slots whose blocks are elsewhere by now, and are to be forgotten here."""
        self.behind: dict[int, dict[TenantId, int]] = {}
        """Of each other segment, by its number: the slot of what was carried there last of each tenant's, in the
        order of carrying."""
        self.uses = array("Q", bytes(8 * count))
        """When each slot's block was last used, as the stock counts uses."""
        self.news = News()
        """What the segment has yet to note down."""
        self._free = count
        self._vacant = array("I", range(count - 1, -1, -1))
        """The free slots, and some that were adopted since: these are passed over. Taken from the end: low numbers
        first."""

    @property
    def on_disk(self) -> bool:
        """Whether this is a disk tier."""
        return self.place.tier is Tier.DISK

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return self._free

    @property
    def room(self) -> int:
        """Slots that can be had, if need be by evicting."""
        return self._free + self.idle.evictable

    @property
    def excess(self) -> int:
        """How many blocks should go before their room is wanted: none up to the watermark."""
        used = self.place.slots - self.free
        return used - self._trimmed if used > self._watermark else 0

    @property
    def copies(self) -> int:
        """Blocks that are copies, committed or not."""
        return len(self.copy_slots)

    @property
    def copies_room(self) -> int:
        """Copies that can still be taken."""
        return min(self.room, self.copies_max - self.copies)

    @property
    def leased(self) -> int:
        """Cached blocks that a lease names."""
        return self.cached - len(self.idle)

    @property
    def next_to_go(self) -> tuple[int, int] | None:
        """The age of what would be evicted next; None if nothing can go but what is pinned."""
        return self._age_to_go(self.idle.next_unpinned)

    def next_own(self, tenant: TenantId) -> tuple[int, int] | None:
        """The same of this tenant's blocks alone, where tenants have quotas."""
        return self._age_to_go(self.idle.next_own(tenant))

    def _age_to_go(self, slot: int | None) -> tuple[int, int] | None:
        if slot is None:
            return None
        return (0, 0) if self.idle.is_demoted(slot) else self.age(slot)

    def age(self, slot: int) -> tuple[int, int]:
        """What is older is less: by its last use, and of what was not used since the directory began, by its
        writing."""
        return self.uses[slot], self.generations[slot]

    def leave_next(self, slot: int) -> None:
        """Its block is the next to be carried."""
        self.leaving[slot] = None
        self.leaving.move_to_end(slot, last=False)

    def used(self) -> Iterator[Block]:
        """The blocks in the slots that are not free. O(slots)."""
        return (Block(self, slot) for slot, generation in enumerate(self.generations) if generation)

    def at(self, grant: Grant) -> Block | None:
        """The block that was granted, if its slot still holds it."""
        known = 0 <= grant.slot < self.place.slots and 0 < grant.generation == self.generations[grant.slot]
        return Block(self, grant.slot) if known else None

    def take(self, generation: int, tenant: TenantId, copy: bool) -> Block:
        """Put a free slot to use, reserved for one lease of this tenant."""
        slot = self._vacant.pop()
        while self.generations[slot]:
            slot = self._vacant.pop()
        self._free -= 1
        self._own(slot, tenant)
        self.generations[slot] = generation
        self.leases[slot] = 1
        if copy:
            self.copy_slots.add(slot)
        return Block(self, slot)

    def adopt(self, notes: Sequence[Note]) -> list[Block]:
        """Put free slots to the use that they have been noted for, cached; the others' notes are old. O(notes)."""
        slots, generations = self.place.slots, self.generations
        taken = {n.slot: n for n in reversed(notes) if 0 <= n.slot < slots and not generations[n.slot]}
        self._free -= len(taken)
        for slot, note in taken.items():
            self.generations[slot] = note.generation
            self.names[slot] = BlockHash(note.name)
            self._own(slot, note.tenant)
        self.cached += len(taken)
        return [Block(self, note.slot) for note in notes if taken.get(note.slot) is note]

    def refuse(self, note: Note) -> None:
        """The segment shall forget what it has noted, unless the slot has been named anew."""
        if 0 <= note.slot < self.place.slots and self.names[note.slot] is None:
            self.news.tell(Grant(self.place.segment, note.slot, note.generation), b"")

    def count_reading(self, slot: int) -> None:
        """On a disk: at the second time the block is worth a place in memory."""
        if not self.on_disk:
            return
        if slot in self.read:
            self.due[slot] = None
        self.read.add(slot)

    def give(self, block: Block) -> None:
        """The slot holds nothing any more."""
        assert block.name is None, "a block is forgotten before its slot is free"
        self.generations[block.slot] = 0
        self.uses[block.slot] = 0
        self.read.discard(block.slot)
        self.spoiled.discard(block.slot)
        self.copy_slots.discard(block.slot)
        self._disown(block.slot)
        self._free += 1
        if len(self._vacant) < 2 * self.place.slots:
            self._vacant.append(block.slot)
        else:  # after as many adoptions as there are slots
            slots = range(self.place.slots - 1, -1, -1)
            self._vacant = array("I", (slot for slot in slots if not self.generations[slot]))

    def enlist(self) -> None:
        """Its slots count for quotas from now on, and what they hold for its tenants; a disk's never do."""
        if self._enlisted or self.on_disk:
            return
        self._enlisted = True
        self._counted.resize(self.place.slots)
        for block in self.used():
            self._counted.add(block.tenant)

    def strike(self) -> None:
        """They count no more."""
        if not self._enlisted:
            return
        self._enlisted = False
        self._counted.resize(-self.place.slots)
        for block in self.used():
            self._counted.drop(block.tenant)

    def _own(self, slot: int, tenant: TenantId) -> None:
        """It is this tenant's from now on."""
        if tenant != NO_TENANT:
            self.tenants[slot] = tenant
        if self._enlisted:
            self._counted.add(tenant)

    def _disown(self, slot: int) -> None:
        """It is nobody's any more."""
        tenant = TenantId(self.tenants[slot])
        if tenant != NO_TENANT:
            self.tenants[slot] = NO_TENANT
        if self._enlisted:
            self._counted.drop(tenant)

    def keep(self, block: Block) -> None:
        """No other segment has this block any more, so it is no copy."""
        self.copy_slots.discard(block.slot)

    def due_blocks(self, limit: int) -> list[Block]:
        """At most so many of those in `due`. They are due after all others then, so that those for which there is
        no room are in nobody's way."""
        slots = [*islice(self.due, limit)]
        for slot in slots:
            self.due[slot] = self.due.pop(slot)
        return [Block(self, slot) for slot in slots if self.names[slot] is not None]

    def catalogue(self, after: int, limit: int) -> list[Note]:
        """At most so many of the cached blocks in the slots after this one, in the order of their slots."""
        slots = range(max(after, -1) + 1, self.place.slots)
        named = ((slot, name) for slot in slots if (name := self.names[slot]) is not None)
        told = ((slot, self.generations[slot], name, self.tenants[slot]) for slot, name in islice(named, limit))
        return [Note(slot, generation, name, TenantId(tenant)) for slot, generation, name, tenant in told]

    def stats(self) -> SegmentStats:
        """Counts of its blocks."""
        place = self.place
        counts = (place.slots, self.free, self.cached, self.leased, self.idle.pinned, self.copies)
        return SegmentStats(
            place.segment, place.incarnation, place.host, *counts, self.on_disk, draining=self.draining
        )

    def check(self) -> None:
        """Asserts that no slot is lost or doubled, and that `idle` and `cached` are what they say."""
        used = list(self.used())
        slots = {block.slot for block in used}
        assert slots.union(self._vacant) == set(range(self.place.slots))
        assert self.free + len(slots) == self.place.slots
        assert len(self._vacant) <= 2 * self.place.slots
        assert self.copy_slots | self.spoiled | self.read | self.due.keys() <= slots
        assert self.copies <= self.copies_max
        assert not any(self.tenants[slot] for slot in set(self._vacant) - slots)
        assert self._enlisted is not (self.draining or self.on_disk)
        named = {block.slot for block in used if block.name is not None}
        assert self.cached == len(named) == sum(name is not None for name in self.names)
        assert not self.draining or self.leaving.keys() | self.moved.keys() == named
        assert self.leaving.keys().isdisjoint(self.moved)
        assert self.moved.keys() <= named
        assert self.draining or not self.leaving
        assert set(self.idle) == {slot for slot in named if not self.leases[slot]}
        assert all(self.idle.kind(slot) is None for slot in slots - named), "what has no name is not pinned"
        assert self.idle.pinned == sum(self.idle.kind(slot) is not None for slot in named)
        assert all(self.leases[slot] > 0 for slot in slots - named)
        self.idle.check()
