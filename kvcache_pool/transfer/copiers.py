"""The threads that copy, and the order in which they are had. Long copies never run in the event loop."""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from kvcache_pool.api import Priority
from protocol.errors import DangoError, PeerLost

COPY_THREADS = 2
"""The second lets a load begin while a store's hop is being copied."""

HOP_BYTES = 2 << 20
"""Copied in one go, in well under a millisecond: how long what is more urgent waits, what is cancelled goes on."""

HOP_RUNS = 512
"""Of one hop at most: tiny runs cost by their number, and one system call takes 1,024 buffers."""

INLINE_BYTES = 5 << 18
"""What is no longer is copied where it stands, in the event loop: to wake a thread and be woken takes 0.1 ms, and
the copy as long."""

SLICED_BYTES = 16 << 20
"""What somebody waits for, in shared memory, and is no longer goes in the event loop too, in slices of
INLINE_BYTES between which all others have their turn: a thread would take a fifth longer."""

ORDER = {Priority.LOAD: 0, Priority.STORE: 1, Priority.WRITE_BACK: 2}

T = TypeVar("T")


class Got(NamedTuple):
    """What a read from one segment has brought."""

    good: int
    """So many leading units are there, verified."""
    fault: DangoError | None = None
    """Why the others did not come: the way broke. None: the next one is not what was written, or there is none."""


class Turns:
    """At most `count` at once; who waits gets in by priority, then in order of arrival.

    Owns the waiting line, which is as long as the callers are many. Always: nobody waits while a turn is free.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._numbers = itertools.count()
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, priority: Priority) -> AsyncIterator[None]:
        """Hold one turn."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give()

    async def _take(self, priority: Priority) -> None:
        if self._free:
            self._free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (ORDER[priority], next(self._numbers), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self._give()  # the turn came in the same instant
            raise

    def _give(self) -> None:
        while self._line:
            _, _, next_one = heapq.heappop(self._line)
            if not next_one.done():
                next_one.set_result(None)
                return
        self._free += 1


class Copiers:
    """A few threads. Owns them until `close`.

    What is asked for at once is done by one thread, hop after hop: both would want the interpreter's lock between
    any two copies, and be slower than one. Between two hops whatever is more urgent goes first, without a word to
    the event loop. The line is as long as the callers are many.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPY_THREADS, "dango-copy")
        self._closed = False
        self._numbers = itertools.count()
        self._line: list[tuple[int, int, _Work[Any]]] = []

    async def run(self, priority: Priority, copy: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
        """As `run_all` of one hop."""
        return (await self.run_all(priority, [copy], stop))[0]

    async def run_all(
        self, priority: Priority, copies: Sequence[Callable[[], T]], stop: Callable[[], None] | None = None
    ) -> list[T]:
        """Run hops in a thread. Raises the first one's error that fails; no other begins then.

        Cancelled, it still waits for the hop that has begun: what it touches is the caller's. `stop`, if given, is
        called then: it makes a hop that waits for others end soon.
        """
        if self._closed:
            raise _way_was_closed()
        work = _Work(copies)
        heapq.heappush(self._line, (ORDER[priority], next(self._numbers), work))
        self._threads.submit(self._next)
        over, cancelled = _over(work.done), None
        while not over.done():
            try:
                await asyncio.wait([over])
            except asyncio.CancelledError as error:
                cancelled = error
                if not work.cancel() and stop is not None:
                    stop()
        if cancelled is not None:
            raise cancelled
        return work.done.result()

    def _next(self) -> None:
        """In a thread: hops, the most urgent first, until one was the last of its transfer. There are as many of
        these, waiting or running, as transfers."""
        while True:
            order, number, work = heapq.heappop(self._line)  # under the interpreter's lock, as the push
            if not work.step():
                return
            heapq.heappush(self._line, (order, number, work))
            if self._closed:
                return

    def close(self) -> None:
        """End the threads; waits for the hops that run, a few milliseconds."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._line:
            heapq.heappop(self._line)[2].fail(_way_was_closed())


class _Work(Generic[T]):
    """The hops of one transfer, of which at most one is being done. `done` has their results in the end."""

    def __init__(self, copies: Sequence[Callable[[], T]]) -> None:
        self.done: Future[list[T]] = Future()
        self._copies = copies
        self._results: list[T] = []
        self._cancelled = False

    def step(self) -> bool:
        """In a thread: do the next hop. Whether there is another one."""
        if not self.done.running() and not self.done.set_running_or_notify_cancel():
            return False
        try:
            self._results.append(self._copies[len(self._results)]())
        except BaseException as error:
            self.done.set_exception(error)
            return False
        if len(self._results) < len(self._copies) and not self._cancelled:
            return True
        self.done.set_result(self._results)
        return False

    def cancel(self) -> bool:
        """No other hop begins. False while one is being done, which goes on."""
        self._cancelled = True
        return self.done.cancel()

    def fail(self, error: DangoError) -> None:
        """Nobody does the rest."""
        if self.done.running() or self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


def hops(count: int, unit_bytes: int, unit_runs: int = 1, most: int = HOP_BYTES) -> list[slice]:
    """`count` units, cut into hops of at most so many bytes, and HOP_RUNS (or of one unit)."""
    step = max(1, min(most // unit_bytes, HOP_RUNS // unit_runs))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


async def together(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; when all have ended, since until then they use the caller's memory, raise the first error."""
    if len(parts) == 1:
        return [await parts[0]]
    results = await asyncio.gather(*parts, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


def leading(cut: Sequence[slice], good: Sequence[int]) -> int:
    """Of units that were cut into hops, of each of which so many leading ones are good: how many leading ones."""
    done = 0
    for hop, count in zip(cut, good, strict=True):
        done += count
        if count < hop.stop - hop.start:
            break
    return done


def _over(done: Future[Any]) -> asyncio.Future[None]:
    """Is done when the other is, whatever became of it."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(over.set_result, None)

    done.add_done_callback(tell)
    return over


def _way_was_closed() -> PeerLost:
    return PeerLost("the way to this segment was closed")
