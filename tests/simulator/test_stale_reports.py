"""B43: load reports stop, and serving goes on from the Conductor's own ledger, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from conductor.ask import Limits
from conductor.config import ConductorConfig
from protocol.frames import Buffer, decode
from protocol.message import Message
from protocol.registry import Pool, Register, Report
from simulator.checks import Ending, check_rest
from simulator.faults import probe
from simulator.loop import run_virtual
from simulator.world import World
from tests.simulator.test_failing import counted, end_of
from tests.simulator.test_world import a_plan

BLOCKED_S = 10.0
EVERY_S = 0.1
LIMITS = Limits(ttft_s=2.0, tbt_s=0.5)
"""With room: prompts take 50 ms on one of two instances, and 10 requests come in a second."""


def block(world: World, chosen: Callable[[str], bool], *lost: type[Message]) -> None:
    """From now on these messages of the chosen instances are lost."""
    tags = {kind.__name__ for kind in lost}

    def stops(origin: str, to: str, frames: Sequence[Buffer]) -> bool:
        return to == "conductor" and chosen(origin) and decode(frames)[0].tag in tags

    world.network.stops = stops


async def stale_after_traffic(world: World, first: int) -> dict[Pool, float]:
    """Serve requests for as long as reports are blocked. Returns what the gauge shows of each pool then."""
    tasks = []
    for number in range(first, first + round(BLOCKED_S / EVERY_S)):
        client = replace(probe(number), limits=LIMITS)
        tasks.append(asyncio.create_task(end_of(world, client, number)))
        await asyncio.sleep(EVERY_S)
    stale = {pool: counted(world, "dango:stale_instances", pool=pool.value) for pool in Pool}
    world.network.stops = None
    told = await asyncio.gather(*tasks)
    assert {one.ending for one in told} == {Ending.FINISHED}, {one.reason for one in told}
    return stale


def in_world(test: Callable[[World], Awaitable[None]]) -> None:
    """Serves to the end, loses nobody, places nothing again, and comes to rest."""

    async def main() -> None:
        world = World(replace(plan, conductor=config, segment_blocks=200))
        await world.start()
        lives = [instance.incarnation for pool in Pool for instance in world.view.of(pool)]
        await test(world)
        assert lives == [instance.incarnation for pool in Pool for instance in world.view.of(pool)]
        assert counted(world, "dango:replacements_total") == 0
        await asyncio.sleep(3.0)
        check_rest(world)
        await world.close()

    plan = a_plan()
    config = ConductorConfig(block_tokens=plan.conductor.block_tokens, context_tokens=plan.context_tokens)
    run_virtual(main())


NOBODY, EVERYBODY = dict.fromkeys(Pool, 0.0), dict.fromkeys(Pool, 2.0)


def test_reports_of_one_then_of_all_are_blocked_and_serving_goes_on() -> None:
    """(a)"""

    async def main(world: World) -> None:
        blocks = [(lambda name: name == "decode-0", NOBODY | {Pool.DECODE: 1.0}), (lambda _: True, EVERYBODY)]
        assert await stale_after_traffic(world, 0) == NOBODY
        for first, (chosen, expected) in enumerate(blocks, start=1):
            block(world, chosen, Report)
            before = [world.members[f"decode-{n}"].engine.computed_s for n in range(2)]
            assert await stale_after_traffic(world, 1000 * first) == expected
            after = [world.members[f"decode-{n}"].engine.computed_s for n in range(2)]
            worked = [then - now for then, now in zip(after, before, strict=True)]
            assert min(worked) > 0.3 * sum(worked), "who is not heard of gets its share all the same"
            await asyncio.sleep(2.0)

    in_world(main)


def test_nothing_at_all_is_heard_of_anybody_and_serving_goes_on() -> None:
    """(a), with registrations blocked too: nobody is taken for dead."""

    async def main(world: World) -> None:
        block(world, lambda _: True, Report, Register)
        assert await stale_after_traffic(world, 0) == EVERYBODY
        await asyncio.sleep(5.0)
        assert await stale_after_traffic(world, 1000) == NOBODY

    in_world(main)
