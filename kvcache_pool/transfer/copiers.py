"""The threads that copy, and the order in which they are had. Long copies never run in the event loop."""

import asyncio
import contextlib
import heapq
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from kvcache_pool.api import Priority
from protocol.errors import DangoError, PeerLost

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
        return (await _all_of([self._line_up(priority, copy)], stop))[0]

    async def run_all(self, priority: Priority, copies: Sequence[Callable[[], T]]) -> list[T]:
        """Run hops beside each other, as `run` does; the event loop hears of the last of them only. When all have
        ended, raises the first error."""
        return await _all_of([self._line_up(priority, copy) for copy in copies], None)

    def _line_up(self, priority: Priority, copy: Callable[[], T]) -> Future[T]:
        work: Future[T] = Future()
        if self._closed:
            raise PeerLost("the way to this segment was closed")
        heapq.heappush(self._line, (ORDER[priority], next(self._numbers), work, copy))
        self._threads.submit(self._next)
        return work

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


async def _all_of(works: Sequence[Future[T]], stop: Callable[[], None] | None) -> list[T]:
    """The results. Cancelled, hops that have begun are waited for; those that have not never begin."""
    over = _over(works)
    cancelled: asyncio.CancelledError | None = None
    while not over.done():
        try:
            await asyncio.wait([over])
        except asyncio.CancelledError as error:
            cancelled = error
            begun = [work for work in works if not work.cancel()]
            if begun and stop is not None:
                stop()
    if cancelled is not None:
        raise cancelled
    return [work.result() for work in works]


def _over(works: Sequence[Future[T]]) -> asyncio.Future[None]:
    """Is done when all of them are."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    left, lock = len(works), threading.Lock()

    def count(_: Future[T]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(over.set_result, None)

    for work in works:
        work.add_done_callback(count)
    return over
