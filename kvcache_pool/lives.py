"""Which segments may join the pool. Pure."""

from collections.abc import Sequence

from kvcache_pool.api import Place
from protocol.ids import Incarnation, SegmentId

SLOTS_MAX = 1 << 23
"""Of all segments together: terabytes of KV. Each slot costs the directory memory, so more is refused. What claims
more alone has a wrong layout, or lies."""

LIVES_MAX = 16
"""Incarnations of a segment that are remembered, should an earlier one wake up and announce itself."""

NAMES_MAX = 4096
"""Names that segments have had. A pool keeps to a few."""


class Lives:
    """The incarnations that each segment's name has had. Owns them. Mutates: join.

    Always: only the last of a name may come again, so one that was paused does not replace its successor.
    """

    def __init__(self) -> None:
        self._of: dict[SegmentId, list[Incarnation]] = {}  # each in their order, the last of them LIVES_MAX

    def join(self, place: Place, others: Sequence[Place]) -> None:
        """Let a segment in beside the others. Raises ValueError, and then has changed nothing."""
        segment = place.segment
        if any(other.layout != place.layout for other in others):
            raise ValueError(f"segment {segment} has another layout than the others: {place.layout}")
        if place.slots < 1:
            raise ValueError(f"segment {segment} has {place.slots} slots; it must have one at least")
        if place.slots + sum(other.slots for other in others) > SLOTS_MAX:
            raise ValueError(f"segment {segment} has {place.slots} slots; all together may have {SLOTS_MAX}")
        if segment not in self._of and len(self._of) >= NAMES_MAX:
            raise ValueError(f"segments have had {NAMES_MAX} names, and may not have more")
        lives = self._of.get(segment, [])
        if place.incarnation in lives[:-1]:
            raise ValueError(f"segment {segment} has a newer life")
        if lives[-1:] != [place.incarnation]:
            self._of[segment] = [*lives, place.incarnation][-LIVES_MAX:]
