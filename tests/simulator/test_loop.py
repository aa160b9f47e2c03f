"""Virtual time: it passes only by timers, in order, and never by itself."""

import asyncio
import time

import pytest

from simulator.loop import TIMERS_MAX, Stuck, run_virtual


def test_an_hour_passes_at_once_and_exactly():
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(main()) == 3600.0
    assert time.monotonic() - began < 60.0


def test_timers_fire_in_their_order_and_timeouts_count_virtual_seconds():
    heard: list[str] = []

    async def say(name: str, after: float) -> None:
        await asyncio.sleep(after)
        heard.append(name)

    async def main() -> None:
        await asyncio.gather(say("c", 3.0), say("a", 1.0), say("b", 2.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(100.0)
        assert asyncio.get_running_loop().time() == pytest.approx(8.0)

    run_virtual(main())
    assert heard == ["a", "b", "c"]


def test_timers_that_were_cancelled_change_nothing_however_many() -> None:
    heard: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(5 * TIMERS_MAX):
            after = float(number % 100)
            kept, cancelled = (
                loop.call_later(after, heard.append, after),
                loop.call_later(after, heard.append, -1.0),
            )
            cancelled.cancel()
            assert kept.when() == after
        await asyncio.sleep(100.0)

    run_virtual(main())
    assert heard == sorted(heard)
    assert (len(heard), heard[0]) == (5 * TIMERS_MAX, 0.0)


def test_waiting_for_what_never_comes_is_an_error_and_not_a_hang():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run_virtual(main())


def test_time_does_not_pass_while_something_is_ready():
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0
