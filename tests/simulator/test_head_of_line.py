"""B39: nobody stands behind others for longer than must be, over whole worlds on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from conductor.ask import Ask, Limits, Priority, Refused
from engine.api import Sampling
from protocol.ids import RequestId, token_ids
from simulator.drive import DEADLINE_S, Watch
from simulator.engine import END
from simulator.loop import run_virtual
from simulator.plan import plan_of
from simulator.setup import Setup
from simulator.workload import Arrival
from simulator.world import World

CHUNK = 1024
INTERACTIVE, BATCH = Limits(30.0, 0.5), Limits(300.0, 1.0)
"""As shipped."""


@dataclass
class Ended:
    """How one request ended. Times from its arrival."""

    admitted_s: float
    ttft_s: float
    longest_gap_s: float
    refused: str


async def ask(world: World, tokens: int, output: int, priority: Priority = Priority.INTERACTIVE) -> Ended:
    """One request, like no other."""
    loop, watch, refused = asyncio.get_running_loop(), Watch(0.0), ""
    numbers[0] += 1
    prompt = token_ids([numbers[0]] * tokens)
    sampling = Sampling(seed=output, max_tokens=world.plan.context_tokens - tokens, stop_tokens=[END])
    limits, began = BATCH if priority is Priority.BATCH else INTERACTIVE, loop.time()
    try:
        request = RequestId(f"r{numbers[0]}")
        await world.dispatcher.serve(
            Ask(request, prompt, [sampling], within_s=DEADLINE_S, priority=priority, limits=limits), watch
        )
    except Refused as error:
        refused = error.refusal.reason
    admitted_s = loop.time() - began if watch.admitted_at is None else watch.admitted_at - began
    ttft_s = loop.time() - began if watch.first_at is None else watch.first_at - began
    gaps = [gap_s for gap_s, _ in watch.gaps[1:]]  # the first one is the hand-over
    return Ended(admitted_s, ttft_s, max(gaps, default=0.0), refused)


numbers = [0]


def in_world(test: Callable[[World], Awaitable[None]]) -> None:
    """One instance of each pool, so that everybody meets."""
    setup = Setup(prefill=1, decode=1, chunk_tokens=CHUNK, steps_max=1, stream_interval=1, report_s=0.5)
    plan = plan_of(setup, [Arrival(0.0, 65_536, 2000, [0] * 128)])
    plan = replace(plan, conductor=replace(plan.conductor, batch_age_s=60.0))

    async def main() -> None:
        world = World(plan)
        await world.start()
        await test(world)
        await world.close()

    run_virtual(main())


def test_a_long_prompt_stalls_no_stream_and_short_ones_wait_for_its_prefill_at_most() -> None:
    """(a)"""

    async def main(world: World) -> None:
        cost = world.plan.cost
        chunk_s = cost.prefill_s(CHUNK, 7000)
        stream = asyncio.create_task(ask(world, 512, 400))
        await asyncio.sleep(2.0)
        alone_s = sum(cost.prefill_s(CHUNK, start) for start in range(0, 7168, CHUNK))
        long = asyncio.create_task(ask(world, 7168, 10))
        await asyncio.sleep(0.001)
        short = [asyncio.create_task(ask(world, 256, 10)) for _ in range(20)]
        assert (await stream).longest_gap_s <= 3 * chunk_s
        assert (await long).ttft_s < 1.2 * alone_s
        waited = [(await one).ttft_s for one in short]
        assert max(waited) < 1.2 * (alone_s + 20 * cost.prefill_s(256, 0))

    in_world(main)


def test_a_long_prompt_goes_to_its_prefill_under_steady_short_ones() -> None:
    """(b)"""

    async def main(world: World) -> None:
        each_s = world.plan.cost.prefill_s(512, 0)
        short = []
        for number in range(400):
            short.append(asyncio.create_task(ask(world, 512, 20)))
            if number == 100:
                long = asyncio.create_task(ask(world, 32_768, 20))
            await asyncio.sleep(each_s / 0.9)
        ended = await long
        assert (ended.refused, ended.ttft_s < INTERACTIVE.ttft_s) == ("", True)
        assert {(await one).refused for one in short} == {""}

    in_world(main)


def test_an_interactive_request_does_not_stand_behind_the_batch_that_came_before() -> None:
    """(c): two minutes of batch are there; it begins within one prompt of it, and the batch is served too."""

    async def main(world: World) -> None:
        each_s = sum(world.plan.cost.prefill_s(CHUNK, start) for start in range(0, 8192, CHUNK))
        batch = [asyncio.create_task(ask(world, 8192, 20, Priority.BATCH)) for _ in range(round(120.0 / each_s))]
        await asyncio.sleep(5.0)
        high = await ask(world, 512, 20)
        assert high.refused == ""
        assert high.ttft_s < 3 * each_s
        assert {(await one).refused for one in batch} == {""}

    in_world(main)
