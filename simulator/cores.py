"""A machine whose cores several processes share, on virtual time: the more compute, the slower is each.

The system's scheduler is taken to be fair at every moment (processor sharing). So there is one clock of work done,
the same for all who compute: it runs as fast as each of them does, and one is done when it has moved by its work.
"""

import asyncio
import heapq
import itertools
from collections.abc import Sequence

EPSILON_S = 1e-9
"""Work that rounding may leave over: far less than a pass, far more than an hour's clock can be off."""


class Cores:
    """Hand it to all engines of one machine. `speeds` are as a CostModel has them."""

    def __init__(self, speeds: Sequence[float] = ()) -> None:
        self._speeds = speeds
        self._work = 0.0
        """Seconds of work done by one that has computed all the time."""
        self._at = 0.0
        self._busy: list[tuple[float, int, asyncio.Future[None]]] = []
        """Who computes: up to which work, in a heap."""
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def shared(self) -> bool:
        """Whether anybody slows anybody down."""
        return bool(self._speeds)

    async def compute(self, seconds: float) -> None:
        """Returns when work that takes `seconds` alone is done."""
        if not self.shared:
            return await asyncio.sleep(seconds)
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        done: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._busy, (self._work + seconds, next(self._numbers), done))
        self._wait(loop)
        try:
            await done
        finally:
            if done.cancelled():
                self._advance(loop.time())
                self._busy = [one for one in self._busy if one[2] is not done]
                heapq.heapify(self._busy)
                self._wait(loop)

    def speed(self, busy: int) -> float:
        """Of each of so many that compute, against one alone. More than there are cores share them equally."""
        known = len(self._speeds)
        return self._speeds[busy - 1] if busy <= known else self._speeds[-1] * known / busy

    def _advance(self, now: float) -> None:
        """Count the work since the last change."""
        if self._busy:
            self._work += (now - self._at) * self.speed(len(self._busy))
        self._at = now

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """For the first who will be done, as things are now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._busy:
            left_s = max(self._busy[0][0] - self._work, 0.0) / self.speed(len(self._busy))
            self._timer = loop.call_later(left_s, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._advance(loop.time())
        while self._busy and self._busy[0][0] <= self._work + EPSILON_S:
            done = heapq.heappop(self._busy)[2]
            if not done.done():
                done.set_result(None)
        self._wait(loop)
