"""Tasks that begin and end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(runs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end; when one fails, cancel the others, wait for them, and raise what it raised.

    What an asyncio.TaskGroup is for, but for two things. The exception comes out as it went in, not in a group.
    And when the caller is cancelled in the moment in which a task fails, the cancellation wins: whoever
    handled the failure would go on with work that nobody wants any more.
    """
    tasks = [asyncio.create_task(run) for run in runs]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await _settled(tasks)
    failures = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if failures:
        raise failures[0]
    assert not any(task.cancelled() for task in tasks), "a task was cancelled, and not by us"


async def _settled(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until all have ended, whatever happens meanwhile: they use what the caller is about to free."""
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
