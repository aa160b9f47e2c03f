"""The threads that copy, and the order in which they are had. The event loop never copies KV itself."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from kvcache_pool.api import Priority

COPY_THREADS = 2
"""One keeps up with memory; the second lets a load begin while a store's hop is being copied."""

HOP_BYTES = 4 << 20
"""Copied in one go, about a millisecond: how long a more urgent transfer waits, or a cancelled one goes on."""

ORDER = {Priority.LOAD: 0, Priority.STORE: 1, Priority.WRITE_BACK: 2}

P = ParamSpec("P")
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
    """A few threads. Owns them until `close`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPY_THREADS, "dango-copy")
        self._turns = Turns(COPY_THREADS)

    async def run(self, priority: Priority, copy: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run one hop in a thread. Cancelled, it still waits for the thread: what it touches is the caller's."""
        async with self._turns.turn(priority):
            loop = asyncio.get_running_loop()
            return await _to_the_end(loop.run_in_executor(self._threads, lambda: copy(*args, **named)))

    def close(self) -> None:
        """End the threads; waits for the hops that run, a few milliseconds."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def hops(count: int, run_bytes: int) -> list[slice]:
    """`count` runs, cut into hops of at most HOP_BYTES (or of one run)."""
    step = max(1, HOP_BYTES // run_bytes)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


async def _to_the_end(work: asyncio.Future[T]) -> T:
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # seen; the cancellation goes first
        raise cancelled
    return work.result()
