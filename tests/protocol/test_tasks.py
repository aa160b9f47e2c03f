"""Tasks that end together: failures as they were, cancellations that win, nobody left running."""

import asyncio

import pytest

from protocol.tasks import together


class Lost(Exception):
    pass


async def fail(after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise Lost


async def test_all_run_to_their_end_side_by_side():
    ended: list[int] = []

    async def run(number: int, gate: asyncio.Event, opens: asyncio.Event) -> None:
        await gate.wait()
        ended.append(number)
        opens.set()

    gates = [asyncio.Event() for _ in range(4)]
    gates[3].set()
    async with asyncio.timeout(1):
        await together(run(n, gates[n], gates[n - 1]) for n in range(4))
    assert ended == [3, 2, 1, 0]
    await together([])


async def test_a_failure_comes_out_as_it_was_after_the_others_have_ended():
    cleaned = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleaned.set()

    with pytest.raises(Lost):
        await together([slow(), fail()])
    assert cleaned.is_set()


async def test_cancelling_ends_all_and_waits_for_their_cleaning_even_if_cancelled_again():
    cleaned = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.03)
            cleaned.set()

    task = asyncio.create_task(together([slow()]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


async def test_a_cancellation_in_the_moment_of_a_failure_wins():
    """Else whoever handles the failure goes on with work that nobody wants."""
    gate = asyncio.Event()

    async def fail_at_once() -> None:
        await gate.wait()
        raise Lost

    task = asyncio.create_task(together([fail_at_once(), asyncio.sleep(60)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.set()
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
