"""The threads that copy, and the order in which they are had. Long copies never run in the event loop."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvcache_pool.api import Priority
from protocol.errors import PeerLost

COPY_THREADS = 2
"""One keeps up with memory if it need not hash; both together do with hashing, and one lets a load begin while a
store's hop is being copied."""

HOP_BYTES = 2 << 20
"""Copied in one go, in well under a millisecond: how long what is more urgent waits, what is cancelled goes on."""

HOP_RUNS = 512
"""Of one hop at most: tiny runs cost by their number, and one system call takes 1,024 buffers."""

INLINE_BYTES = 5 << 18
"""What is no longer is copied where it stands, in the event loop: to wake a thread and be woken takes 0.1 ms, and
the copy as long."""

ORDER = {Priority.LOAD: 0, Priority.STORE: 1, Priority.WRITE_BACK: 2}

T = TypeVar("T")


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

    The line is as long as the callers' hops are many. A thread that is free takes the most urgent hop at once,
    without waiting for the event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPY_THREADS, "dango-copy")
        self._closed = False
        self._numbers = itertools.count()
        self._line: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []

    async def run(self, priority: Priority, copy: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
        """Run one hop in a thread. Cancelled, it still waits for the thread: what it touches is the caller's.

        `stop`, if given, is called when cancelled: it makes a hop that waits for others end soon.
        """
        work: Future[T] = Future()
        if self._closed:
            raise PeerLost("the way to this segment was closed")
        heapq.heappush(self._line, (ORDER[priority], next(self._numbers), work, copy))
        self._threads.submit(self._next)
        return await _to_the_end(work, stop)

    def _next(self) -> None:
        """In a thread: do what is most urgent now. As many of these are submitted as hops are in the line."""
        _, _, work, copy = heapq.heappop(self._line)  # one C call, under the interpreter's lock, as the push is
        if not work.set_running_or_notify_cancel():
            return
        try:
            result = copy()
        except BaseException as error:
            work.set_exception(error)
        else:
            work.set_result(result)

    def close(self) -> None:
        """End the threads; waits for the hops that run, a few milliseconds."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._line:
            _, _, work, _ = heapq.heappop(self._line)
            if work.set_running_or_notify_cancel():
                work.set_exception(PeerLost("the way to this segment was closed"))


def hops(count: int, unit_bytes: int, unit_runs: int = 1) -> list[slice]:
    """`count` units, cut into hops of at most HOP_BYTES and HOP_RUNS (or of one unit)."""
    step = max(1, min(HOP_BYTES // unit_bytes, HOP_RUNS // unit_runs))
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


async def _to_the_end(work: Future[T], stop: Callable[[], None] | None) -> T:
    """The result. Cancelled, a hop that has begun is waited for; one that has not never begins."""
    waiting = asyncio.wrap_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError as error:
            cancelled = error
            if work.cancel():
                break
            if stop is not None:
                stop()
    if cancelled is not None:
        if not waiting.cancelled() and waiting.done():
            waiting.exception()  # seen; the cancellation goes first
        raise cancelled
    return waiting.result()
