"""What a segment has yet to hear of its own slots. Pure.

Only the directory knows which block a slot holds; the segment notes it down in its file, for the directory's next
life and for its own. It hears the news with each answer to its announcements,
and tells with the next what it noted.
"""

from collections import OrderedDict

from kvcache_pool.api import NOTES_MAX, Grant, Note
from protocol.ids import NO_TENANT, TenantId


class News:
    """Of one segment, from its joining on. At most one piece for each slot: the latest.

    Owns the numbers. Always: in the order of their numbers. Mutates: tell, since.
    """

    def __init__(self) -> None:
        self._number = 0
        self._latest: OrderedDict[int, tuple[int, Note]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def number(self) -> int:
        """Of the last piece."""
        return self._number

    def noted(self, number: int) -> bool:
        """Whether the segment has noted all that is true of the pieces up to this one."""
        return not self._latest or next(iter(self._latest.values()))[0] > number

    def is_untold(self, slot: int) -> bool:
        """Whether the segment has yet to note down what this slot holds."""
        return slot in self._latest

    def tell(self, grant: Grant, name: bytes, tenant: TenantId = NO_TENANT) -> None:
        """This use of a slot holds that block now, or (an empty name) none that should be found."""
        self._number += 1
        self._latest[grant.slot] = (self._number, Note(grant.slot, grant.generation, name, tenant))
        self._latest.move_to_end(grant.slot)

    def since(self, noted: int) -> tuple[list[Note], int]:
        """Forget what is noted; the oldest of the rest, at most NOTES_MAX, and the number of the last of them."""
        while self._latest and next(iter(self._latest.values()))[0] <= noted:
            self._latest.popitem(last=False)
        told = [piece for _, piece in zip(range(NOTES_MAX), self._latest.values(), strict=False)]
        return [note for _, note in told], told[-1][0] if told else noted
