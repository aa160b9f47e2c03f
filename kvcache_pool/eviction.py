"""Which cached block goes first when room is needed. Pure.

The law: the least recently used goes first, and of one prefix its end before its front, since a block is
worth nothing without those before it. Whoever uses a prefix therefore touches it from last to first.

Who has taken a copy of a prefix to another segment sends it to the front of the line here, also its end first: the
next use is expected there, and until then both hold what one could. A prefix that is hot in both is soon touched
again, and one that is hot everywhere is everywhere, so nobody copies it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

B = TypeVar("B", bound=Hashable)


class LeastRecent(Generic[B]):
    """The blocks that may be evicted, in the order in which they will be. Every operation is O(1).

    Owns the order only. Always: holds exactly the cached blocks that no lease names.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[B, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: B) -> bool:
        return block in self._order

    def __iter__(self) -> Iterator[B]:
        return iter(self._order)

    def touch(self, block: B) -> None:
        """Add a block, or refresh it: it is now the last to go."""
        self._order[block] = None
        self._order.move_to_end(block)

    def demote(self, block: B) -> None:
        """It is now the next to go, if it is here."""
        if block in self._order:
            self._order.move_to_end(block, last=False)

    def drop(self, block: B) -> None:
        """A lease names it now, or it is forgotten. A block that is not here is no error."""
        self._order.pop(block, None)

    def take(self) -> B:
        """Remove and return the next to go. Raises KeyError when there is none."""
        return self._order.popitem(last=False)[0]
