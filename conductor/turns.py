"""How fast the line of held requests moves, and so how long a newcomer would stand in it. Pure."""

from collections import deque

TURNS = 64
"""Admissions that are remembered: enough for a mean, and no older than what the pools do now."""

TURNS_MIN = 8
"""With fewer, nothing is said of the wait."""


class Turns:
    """When those who were held were admitted, since the line was last empty. Mutates: took, empty."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=TURNS)

    def took(self, now: float) -> None:
        """A held request is admitted."""
        self._at.append(now)

    def empty(self) -> None:
        """Nobody is held: how fast a line would move is not known any more."""
        self._at.clear()

    def wait_s(self, ahead: int, now: float) -> float:
        """Expected time until `ahead` more are admitted: as long as equally many took of late. 0: unknown."""
        if len(self._at) < TURNS_MIN:
            return 0.0
        return ahead * (now - self._at[0]) / len(self._at)
