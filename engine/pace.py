"""How fast an instance's engine has been of late: moving means for people, timings for those who predict."""

from collections import deque

from protocol.registry import TIMINGS_MAX, Timing

DECAY = 0.8
"""Weight of the past in the moving means: about five steps of memory."""

SECONDS_MIN = 1e-9
"""A clock may not have moved during a very short step."""


class Pace:
    """Moving means over the passes of one engine, 0 before the first, and the timings of the latest passes.

    Passes are numbered from 1; a step number names a timing once and for all in this life of the process.
    Mutates: count, timings.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Passes so far."""
        self.step_s = 0.0
        """Mean time of a pass, in seconds."""
        self.tokens_s = 0.0
        """Mean rate, in tokens a second."""
        self._timings: deque[Timing] = deque(maxlen=TIMINGS_MAX)

    def count(
        self,
        tokens: int,
        context: int,
        seconds: float,
        steps: int = 1,
        *,
        clean: bool = True,
        rest: int = 0,
        prefix: int = 0,
    ) -> None:
        """Take in `steps` more passes that took `seconds` together.

        Of each prefill pass: the `tokens` computed and, as `context`, those of the same prompt before them. Of
        each decode step: the sequences, and the tokens whose KV it read over all of them (of several steps, the
        mean). Several passes make one timing, of their mean. A step that computed tokens of a prompt beside its
        batch says how many (`rest`, `prefix`, as in a Timing). `clean` False: they did other work besides, and
        tell nothing of how long such a pass takes. The first pass of a process is not told: it warms caches.
        """
        past = DECAY**steps if self.steps else 0.0
        cold = self.steps == 0
        self.steps += steps
        each = seconds / steps
        self.step_s = past * self.step_s + (1 - past) * each
        self.tokens_s = past * self.tokens_s + (1 - past) * tokens / max(each, SECONDS_MIN)
        if clean and not cold:
            self._timings.append(Timing(self.steps, tokens, context, each, rest, prefix))

    def timings(self) -> list[Timing]:
        """Those since the last call, the latest TIMINGS_MAX of them, oldest first."""
        told = list(self._timings)
        self._timings.clear()
        return told
