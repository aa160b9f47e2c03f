"""Where the blocks of a name are: what a lookup walks. Pure.

A place is one number, the segment's number and the slot in it. With a million blocks memory is what counts, and
what a walk must fetch: so a name that is in one segment only, as nearly all are, has a bare number and no list of
them, and a walk goes along the slots of a segment where it can.
"""

from collections.abc import Iterator, Mapping, Sequence

from protocol.ids import BlockHash

SLOT_BITS = 32
"""Of a place's number; those above are the segment's."""


def where(home: int, slot: int) -> int:
    """A place as one number."""
    return home << SLOT_BITS | slot


def home_of(place: int) -> int:
    """The number of the segment."""
    return place >> SLOT_BITS


def slot_of(place: int) -> int:
    """The slot in its segment."""
    return place & ((1 << SLOT_BITS) - 1)


Tables = Mapping[int, Sequence[BlockHash | None]]


class Names:
    """The places of each name, at most one in a segment, the oldest first. Mutates: add, remove."""

    def __init__(self) -> None:
        self._places: dict[BlockHash, int | tuple[int, ...]] = {}

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._places)

    def places(self, name: BlockHash) -> tuple[int, ...]:
        """Where this block is. Empty if nowhere."""
        places = self._places.get(name)
        if places is None:
            return ()
        return places if isinstance(places, tuple) else (places,)

    def add(self, name: BlockHash, place: int) -> int:
        """It is here too, in a segment that had it not. Returns how many have it now."""
        others = self.places(name)
        self._places[name] = (*others, place) if others else place
        return len(others) + 1

    def remove(self, name: BlockHash, place: int) -> tuple[int, ...]:
        """It is here no more. Returns where it still is."""
        others = tuple(other for other in self.places(name) if other != place)
        if others:
            self._places[name] = others if len(others) > 1 else others[0]
        else:
            del self._places[name]
        return others

    def reach(self, blocks: Sequence[BlockHash], tables: Tables) -> tuple[int, dict[int, int]]:
        """How far this chain goes in all segments together, and in each alone that has its first block.

        `tables` are the names in the slots of each segment, by its number. A prompt's blocks were given slots one
        after the other, mostly; so where a name is found, the next ones are looked for in the next slots: a row of
        slots is read in a tenth of the time that memory takes to bring up as many entries of a large dict.
        """
        held = {home_of(place): 0 for place in self.places(blocks[0])} if blocks else {}
        unbroken, reach, count, get = set(held), 0, len(blocks), self._places.get
        alone = _only(unbroken)
        while reach < count:
            places = get(blocks[reach])
            if places is None:
                break
            reach += 1
            if isinstance(places, int):
                home = places >> SLOT_BITS
                if home == alone:  # as in nearly all steps
                    names, slot = tables[home], slot_of(places) + 1
                    if reach < count and slot < len(names) and names[slot] == blocks[reach]:
                        reach += _in_row(blocks, reach, names, slot)
                    continue
                places = (places,)
            homes = {home_of(place) for place in places}
            if not unbroken <= homes:
                for home in unbroken - homes:
                    held[home] = reach - 1
                unbroken &= homes
                alone = _only(unbroken)
        for home in unbroken:
            held[home] = reach
        return reach, held


def _only(homes: set[int]) -> int | None:
    return next(iter(homes)) if len(homes) == 1 else None


def _in_row(blocks: Sequence[BlockHash], at: int, names: Sequence[BlockHash | None], slot: int) -> int:
    """How many blocks from `at` on are in the slots from `slot` on."""
    most = min(len(blocks) - at, len(names) - slot)
    for ahead in range(most):
        if blocks[at + ahead] != names[slot + ahead]:
            return ahead
    return most
