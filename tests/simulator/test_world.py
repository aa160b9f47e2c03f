"""A world serves what can be foretold, and goes on whoever dies and comes back."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from conductor.ask import Ask
from conductor.view import Prefilling
from kvcache_pool.leases import QUARANTINE_S
from protocol.ids import RequestId
from protocol.registry import DEAD_AFTER_REPORTS, REPORT_EVERY_S, Pool
from simulator.checks import Ending, Told, check_rest
from simulator.faults import probe, script_of
from simulator.loop import run_virtual
from simulator.network import Weather
from simulator.world import Plan, World

EVERYBODY = ["prefill-0", "prefill-1", "decode-0", "decode-1", "kvcache-0", "kvcache-1", "conductor"]
BACK_S = 2 * DEAD_AFTER_REPORTS * REPORT_EVERY_S


def a_plan() -> Plan:
    return replace(script_of(0).plan, prefills=2, decodes=2, weather=Weather())


def in_world(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(a_plan())
        await world.start()
        await test(world)
        await world.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def asked(world: World, number: int = 0) -> tuple[asyncio.Task[None], Told]:
    client = probe(number)
    told = Told(client)
    return world.serve(Ask(RequestId(f"r{number}"), client.prompt, client.samplings), told), told


async def served(world: World, number: int) -> None:
    task, told = asked(world, number)
    await task
    told.ending = Ending.FINISHED
    told.check()


def test_answers_are_those_foretold_cold_and_warm() -> None:
    async def main(world: World) -> None:
        for number in (0, 1, 0, 1):
            await served(world, number)
        await asyncio.sleep(1.0)
        check_rest(world)
        assert world.memory.corrupted == 0

    in_world(main)


@pytest.mark.parametrize("name", EVERYBODY)
def test_whoever_dies_and_comes_back_serves_again(name: str) -> None:
    async def main(world: World) -> None:
        await served(world, 0)
        before = world.members[name]
        await world.kill(name)
        await asyncio.sleep(0.2)
        world.revive(name)
        assert world.members[name] is not before
        await asyncio.sleep(BACK_S)
        check_rest(world)
        await served(world, 0)
        await served(world, 1)

    in_world(main)


def test_requests_end_with_their_conductor_and_what_they_held_comes_back() -> None:
    async def main(world: World) -> None:
        task, told = asked(world)
        while not told.said[0]:  # noqa: ASYNC110 - time is free here
            await asyncio.sleep(0.001)
        await world.kill("conductor")
        assert task.cancelled()
        assert world.index.stats().leases
        world.revive("conductor")
        await asyncio.sleep(60.0 + QUARANTINE_S)
        check_rest(world)
        assert told.said[0] == told.client.expected[0][: len(told.said[0])]

    in_world(main)


def test_short_rests_are_computed_in_decode_where_prefill_is_busy() -> None:
    """The exact engine tells each byte of KV that is wrong."""

    async def main(world: World) -> None:
        await asyncio.sleep(2 * REPORT_EVERY_S)  # what instances have tried at their start is known by then
        prefills = world.view.of(Pool.PREFILL)
        for instance in prefills:
            work = Prefilling(1, 0, 60.0, asyncio.get_running_loop().time())
            world.view.enter(instance, (RequestId("elsewhere"), 0), work)
        engines = [world.members[one.name].engine for one in prefills]
        computed_s = [engine.computed_s for engine in engines if engine is not None]
        for number in (0, 1, 0):
            await served(world, number)
        assert computed_s == [engine.computed_s for engine in engines if engine is not None]
        for instance in prefills:
            world.view.release(instance, (RequestId("elsewhere"), 0), 0.0)
        await asyncio.sleep(1.0)
        check_rest(world)
        assert world.memory.corrupted == 0

    in_world(main)


def test_nobody_lives_twice() -> None:
    async def main(world: World) -> None:
        with pytest.raises(AssertionError, match="prefill-0 is alive"):
            world.revive("prefill-0")
        assert len(world.view.of(Pool.PREFILL)) == 2

    in_world(main)
