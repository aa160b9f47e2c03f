"""Transfers that a caller has started and holds by a handle: what they have come to, and how they end.

    start ──> waiting ──> moving ──> done
                 │           ├─────> failed        an error, or its time was over
                 └───────────┴─────> cancelled

A transfer that has ended does not touch the caller's memory any more, however it ended.
"""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any

from kvcache_pool.api import Priority
from kvcache_pool.transfer.copiers import Turns
from protocol.errors import DeadlineExceeded, PeerLost

MOVING_MAX = 8
"""Of one priority at once; the others wait in line. Each has a lease and moves 64 MiB at a time: that keeps every
copying thread and stream busy. Those of another priority do not count: a load does not wait for write-backs."""

TRANSFERS_MAX = 4096
"""Open at once, those that wait included. Each holds on to memory of the caller's."""

log = logging.getLogger("dango.pool")


class Status(Enum):
    """What a transfer has come to."""

    WAITING = "waiting"
    """In line: as many as may are moving."""
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass
class Progress:
    """How far some blocks have come. Whoever moves them counts here."""

    total: int
    done: int = 0
    moving: bool = False


class Transfer:
    """One transfer, made by `KVCachePool.start_put` or `start_get_into`. It goes on if nobody keeps this.

    `await transfer` gives its result as often as it is asked for, or raises its error: asyncio.CancelledError if
    it was cancelled. Who is cancelled while awaiting leaves it alone. An error that nobody has heard of is logged.
    """

    def __init__(self, task: "asyncio.Task[int]", progress: Progress) -> None:
        self._task = task
        self._progress = progress
        self._heard = False

    @property
    def status(self) -> Status:
        """What it has come to."""
        if not self._task.done():
            return Status.MOVING if self._progress.moving else Status.WAITING
        if self._task.cancelled():
            return Status.CANCELLED
        return Status.DONE if self._task.exception() is None else Status.FAILED

    @property
    def blocks_done(self) -> int:
        """Of a put: so many are in the pool's memory, to be found when all are. Of a get: so many have arrived and
        are verified. Counted as batches of 64 MiB end."""
        return self._progress.done

    @property
    def blocks_total(self) -> int:
        """So many were named. A get of fewer cached ones is done with fewer."""
        return self._progress.total

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it has not."""
        if self.status is not Status.FAILED:
            return None
        self._heard = True
        return self._task.exception()

    def cancel(self) -> bool:
        """End it soon: until then, for which `wait`, it uses the caller's memory. False if it has ended."""
        return self._task.cancel()

    async def wait(self) -> Status:
        """How it has ended, when it has; its error is not raised."""
        await asyncio.wait([self._task])
        return self.status

    def __await__(self) -> Generator[Any, None, int]:
        return self._result().__await__()

    async def _result(self) -> int:
        try:
            return await asyncio.shield(self._task)
        finally:
            self._heard = self._heard or self._task.done()

    def __del__(self) -> None:
        if not self._heard and self._task.done():
            _tell_unheard(self._task, self._progress)


class Transfers:
    """All open transfers of one client. Owns their tasks.

    Leaving its `async with` waits for what is open; if it is left by an error, that is cancelled first.
    """

    def __init__(self, at_once: int = MOVING_MAX, open_max: int = TRANSFERS_MAX) -> None:
        self._turns = {priority: Turns(at_once) for priority in Priority}
        self._open_max = open_max
        self._tasks: set[asyncio.Task[int]] = set()
        self._closed = False

    def start(
        self, move: Callable[[Progress], Awaitable[int]], blocks: int, priority: Priority, within_s: float | None
    ) -> Transfer:
        """Begin when it is its turn. Past `within_s` seconds from now it ends with DeadlineExceeded.

        Raises ValueError for a time that is none, asyncio.QueueFull when too many are open, PeerLost when the pool
        was left.
        """
        if within_s is not None and not within_s > 0.0:
            raise ValueError(f"a transfer takes more than no time: within_s is {within_s}")
        if self._closed:
            raise PeerLost("this client of the pool was closed")
        if len(self._tasks) >= self._open_max:
            raise asyncio.QueueFull(f"{self._open_max} transfers are open, and there may be no more")
        progress = Progress(blocks)
        task = asyncio.create_task(self._run(move, progress, priority, within_s))
        transfer = Transfer(task, progress)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, weakref.ref(transfer), progress))
        return transfer

    def _run(
        self,
        move: Callable[[Progress], Awaitable[int]],
        progress: Progress,
        priority: Priority,
        within_s: float | None,
    ) -> Coroutine[Any, Any, int]:
        end = None if within_s is None else asyncio.get_running_loop().time() + within_s

        async def run() -> int:
            limit = asyncio.timeout_at(end)
            try:
                async with limit, self._turns[priority].turn(priority):
                    progress.moving = True
                    return await move(progress)
            except TimeoutError as late:
                if not limit.expired():
                    raise
                text = f"{progress.done} of {progress.total} blocks were moved within {within_s:g} s"
                raise DeadlineExceeded(text) from late

        return run()

    def _end(self, handle: "weakref.ref[Transfer]", progress: Progress, task: "asyncio.Task[int]") -> None:
        self._tasks.discard(task)
        if handle() is None:
            _tell_unheard(task, progress)
        elif not task.cancelled():
            task.exception()  # asyncio need not tell of it: the handle does

    async def __aenter__(self) -> "Transfers":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        cancelled: asyncio.CancelledError | None = None
        if kind is not None:
            self._cancel()
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as late:
                cancelled = late
                self._cancel()
        if cancelled is not None:
            raise cancelled

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def _tell_unheard(task: "asyncio.Task[int]", progress: Progress) -> None:
    """Nobody is left who could hear of an error, or can still ask for it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a transfer of %d blocks failed, and nobody asked: %s", progress.total, error)
