"""The slots of one segment: which are free, and what the others hold. Pure."""

from dataclasses import dataclass, field

from kvcache_pool.api import Grant, Place
from kvcache_pool.eviction import LeastRecent
from protocol.ids import BlockHash


@dataclass(eq=False, slots=True)
class Block:
    """A slot in use: *cached* if it has a name, else *reserved*. Equal only to itself."""

    home: "Slots"
    slot: int
    generation: int
    """Of this use of the slot; never seen before in any slot, so an old grant is recognised."""
    name: BlockHash | None = None
    leases: int = 0
    """How many leases name it."""
    spoiled: bool = False
    """A reader found it bad: it is never published (again)."""
    lost: bool = False
    """Its segment has left; only leases remember it."""

    def grant(self) -> Grant:
        """The right to this slot, as it is told to readers and writers."""
        return Grant(self.home.place.segment, self.slot, self.generation)


@dataclass(eq=False)
class Slots:
    """One segment's slots.

    Owns its free list and the blocks in the other slots. Always: free + used == place.slots, and
    `idle` holds exactly the cached blocks that no lease names. Mutates: take, give.
    """

    place: Place
    heard: float
    """When it last announced itself."""
    cached: int = 0
    """Blocks with a name."""
    idle: LeastRecent[Block] = field(default_factory=LeastRecent)
    used: dict[int, Block] = field(default_factory=dict)

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

    def take(self, generation: int) -> Block:
        """Put a free slot to use, reserved for one lease."""
        block = Block(self, self._free.pop(), generation, leases=1)
        self.used[block.slot] = block
        return block

    def give(self, block: Block) -> None:
        """The slot holds nothing any more."""
        assert block.name is None, "a block is forgotten before its slot is free"
        del self.used[block.slot]
        self._free.append(block.slot)

    def check(self) -> None:
        """Asserts that no slot is lost or doubled, and that `idle` and `cached` are what they say."""
        assert sorted([*self._free, *self.used]) == list(range(self.place.slots))
        assert all(block.slot == slot and block.home is self for slot, block in self.used.items())
        assert self.cached == sum(block.name is not None for block in self.used.values())
        idle = {block for block in self.used.values() if block.name is not None and block.leases == 0}
        assert set(self.idle) == idle
        assert len(self.idle) == len(idle)
        assert all(block.name is not None or block.leases > 0 for block in self.used.values())
