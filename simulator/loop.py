"""Virtual time: an asyncio loop that never waits, but moves its clock to the next timer instead.

Whatever reads time only through the running loop runs here unchanged, an hour in seconds. Timers of one moment
fire in the order in which they were set, so the order of all events is the same each time.
"""

# ruff: noqa: SLF001 - it stands in for asyncio's loop, and reads what that reads

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


TIMERS_MAX = 1024
"""With more timers, those that were cancelled are thrown out: the heap is not to grow with the length of a run."""


class Stuck(RuntimeError):
    """Nothing is ready and no timer is set: somebody waits for what will never come."""


class _Call(asyncio.TimerHandle):
    """A callback that is due, now or later. A request makes some hundred of them, and asyncio's own are slower:
    they ask their loop at each step whether it debugs."""

    __slots__ = ()
    _callback: Callable[..., object]
    _context: Context

    def __init__(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], context: Context | None
    ) -> None:
        self._when, self._callback, self._args = when, callback, args
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def __repr__(self) -> str:
        return f"<{self._callback} at {self._when}>"

    def cancel(self) -> None:
        """See asyncio."""
        self._cancelled, self._callback, self._args = True, _nothing, ()


def _nothing() -> None:
    """What is left of a call that was cancelled."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Threads and sockets have no place in it.

    Of asyncio's loop it exchanges how calls and timers are kept (tuples compare faster than handles) and what one
    turn is.
    """

    _ready: deque[_Call]  # asyncio's own, and where Ctrl-C puts a handle of asyncio's own
    _stopping: bool  # asyncio's own: set by `stop`

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, _Call]] = []
        self._timers_max = TIMERS_MAX
        self._numbers = itertools.count()

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio."""
        call = _Call(self._now, callback, args, context)
        self._ready.append(call)
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        call = _Call(when, callback, args, context)
        timers = self._timers
        heapq.heappush(timers, (when, next(self._numbers), call))
        if len(timers) > self._timers_max:  # most are deadlines that were kept, and far away
            timers[:] = [timer for timer in timers if not timer[2]._cancelled]
            heapq.heapify(timers)
            self._timers_max = max(TIMERS_MAX, 2 * len(timers))
        return call

    def _run_once(self) -> None:
        """Moves the clock if nothing is ready. Runs what is ready, and what that makes ready. Raises Stuck."""
        ready = self._ready
        if not ready:
            self._leap()
        while ready and not self._stopping:
            call = ready.popleft()
            if call._cancelled:
                continue
            try:
                call._context.run(call._callback, *call._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"{call} failed", "exception": error})

    def _leap(self) -> None:
        """To the next timer that was not cancelled, with all others of the same moment."""
        timers, ready, pop = self._timers, self._ready, heapq.heappop
        while timers:
            when, _, call = pop(timers)
            if not call._cancelled:
                break
        else:
            raise Stuck("no task can go on, and no timer is set")
        self._now = now = max(self._now, when)
        ready.append(call)
        while timers and timers[0][0] <= now:
            ready.append(pop(timers)[2])


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new virtual loop, and cancel what it left behind. Raises Stuck."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
