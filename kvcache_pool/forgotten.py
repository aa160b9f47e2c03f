"""What was forgotten on purpose, for segments that were away then: what they bring of it is refused. Pure."""

from collections import OrderedDict
from collections.abc import Iterable

from kvcache_pool.api import Note
from protocol.ids import BlockHash

REMOVED_MAX = 1 << 16
"""Names that are remembered, some 10 MB of them; beyond that the ones that were removed first are not."""


class Forgotten:
    """Who was cleared or removed, until the directory ends. A block that was written since is not meant."""

    def __init__(self) -> None:
        self._all_until = 0
        self._until: OrderedDict[bytes, int] = OrderedDict()

    def clear(self, generation: int) -> None:
        """All blocks that were granted up to this generation."""
        self._all_until = generation
        self._until.clear()

    def remove(self, blocks: Iterable[BlockHash], generation: int) -> None:
        """The same of these alone."""
        for name in blocks:
            self._until[name] = generation
            self._until.move_to_end(name)
        while len(self._until) > REMOVED_MAX:
            self._until.popitem(last=False)

    def covers(self, note: Note) -> bool:
        """Whether this block was."""
        return 0 < note.generation <= max(self._all_until, self._until.get(note.name, 0))
