"""The slots of one segment: which are free, and what the others hold. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache_pool.api import Grant, Note, Place
from kvcache_pool.eviction import LeastRecent
from kvcache_pool.news import News
from protocol.ids import BlockHash


@dataclass(eq=False, slots=True)
class Block:
    """A slot in use: *cached* if it has a name, else *reserved*. Equal only to itself."""

    home: "Slots"
    grant: Grant
    """The right to this use of the slot, as readers and writers are told. Its generation was never seen before in
    any slot, so an old grant is recognised."""
    name: BlockHash | None = None
    leases: int = 0
    """How many leases name it."""
    copy: bool = False
    """Made as a copy of what another segment has, which is so still: it counts against the budget of copies."""
    spoiled: bool = False
    """A reader found it bad: it is never published (again)."""
    lost: bool = False
    """Its segment has left; only leases remember it."""


@dataclass(eq=False)
class Slots:
    """One segment's slots.

    Owns its free list and the blocks in the other slots. Always: free + used == place.slots, `idle` holds
    exactly the cached blocks that no lease names, and at most `copies_max` blocks are copies. Mutates: take,
    adopt, give, keep.
    """

    place: Place
    heard: float
    """When it last announced itself."""
    copies_max: int = 0
    """The budget: so many slots may hold copies."""
    cached: int = 0
    """Blocks with a name."""
    copies: int = 0
    """Blocks that are copies, committed or not."""
    idle: LeastRecent[Block] = field(default_factory=LeastRecent)
    used: dict[int, Block] = field(default_factory=dict)
    news: News = field(default_factory=News)
    """What the segment has yet to note down."""

    def __post_init__(self) -> None:
        self._free = list(range(self.place.slots - 1, -1, -1))  # taken from the end: low numbers first

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def room(self) -> int:
        """Slots that can be had, if need be by evicting."""
        return len(self._free) + len(self.idle)

    @property
    def copies_room(self) -> int:
        """Copies that can still be taken."""
        return min(self.room, self.copies_max - self.copies)

    def take(self, generation: int, copy: bool) -> Block:
        """Put a free slot to use, reserved for one lease."""
        slot = self._free.pop()
        block = Block(self, Grant(self.place.segment, slot, generation), leases=1, copy=copy)
        self.used[slot] = block
        self.copies += copy
        return block

    def adopt(self, notes: Sequence[Note]) -> list[Block]:
        """Put free slots to the use that they have been noted for, cached; the others' notes are old. O(slots)."""
        free = set(self._free)
        taken = {note.slot: note for note in reversed(notes) if note.slot in free}
        self._free = [slot for slot in self._free if slot not in taken]
        blocks = [
            Block(self, Grant(self.place.segment, note.slot, note.generation), BlockHash(note.name))
            for note in notes
            if taken.get(note.slot) is note
        ]
        self.used.update((block.grant.slot, block) for block in blocks)
        self.cached += len(blocks)
        return blocks

    def give(self, block: Block) -> None:
        """The slot holds nothing any more."""
        assert block.name is None, "a block is forgotten before its slot is free"
        del self.used[block.grant.slot]
        self._free.append(block.grant.slot)
        if block.copy:
            self.keep(block)

    def keep(self, block: Block) -> None:
        """No other segment has this block any more, so it is no copy."""
        self.copies -= block.copy
        block.copy = False

    def check(self) -> None:
        """Asserts that no slot is lost or doubled, and that `idle` and `cached` are what they say."""
        assert sorted([*self._free, *self.used]) == list(range(self.place.slots))
        assert all(block.grant.slot == slot and block.home is self for slot, block in self.used.items())
        assert self.copies == sum(block.copy for block in self.used.values()) <= self.copies_max
        assert self.cached == sum(block.name is not None for block in self.used.values())
        idle = {block for block in self.used.values() if block.name is not None and block.leases == 0}
        assert set(self.idle) == idle
        assert len(self.idle) == len(idle)
        assert all(block.name is not None or block.leases > 0 for block in self.used.values())
