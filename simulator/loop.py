"""Virtual time: an asyncio loop that never waits, but moves its clock to the next timer instead.

Whatever reads time only through the running loop runs here unchanged, an hour in seconds. Timers of one moment
fire in the order in which they were set, so the order of all events is the same each time.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(RuntimeError):
    """Nothing is ready and no timer is set: somebody waits for what will never come."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Threads and sockets have no place in it.

    Of asyncio's loop it exchanges how timers are kept (tuples compare faster than handles) and what one turn is.
    """

    _ready: deque[asyncio.Handle]  # asyncio's own: what `call_soon` fills

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _run_once(self) -> None:
        """One turn: if nothing is ready, the clock moves; then whatever is ready runs. Raises Stuck."""
        ready = self._ready
        if not ready:
            self._leap()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 - as asyncio's own turn does

    def _leap(self) -> None:
        """To the next timer that was not cancelled, with all others of the same moment."""
        timers, pop = self._timers, heapq.heappop
        while timers and timers[0][2].cancelled():
            pop(timers)
        if not timers:
            raise Stuck("no task can go on, and no timer is set")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(pop(timers)[2])


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new virtual loop, and cancel what it left behind. Raises Stuck."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
