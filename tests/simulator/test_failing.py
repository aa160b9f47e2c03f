"""B42: an instance that accepts and always fails is found out, left alone, and taken back when it is well; what a
client did wrong, and an instance that is full, lower nobody's state. Over whole worlds, on virtual time.

Answers that are streamed and those that are not take the same way: the dispatcher does not know which it serves.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest

from conductor.ask import Ask, Failed, Refused
from conductor.config import ConductorConfig
from conductor.health import FAILURES_MAX, OUT_S
from conductor.retries import SHARE
from protocol.ids import InstanceId, RequestId
from protocol.registry import Pool
from simulator.checks import Ending, Told, check_rest
from simulator.faults import Client, probe
from simulator.loop import run_virtual
from simulator.world import Plan, World
from tests.simulator.test_world import a_plan

IN_FLIGHT_MAX = 40


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Every pass that fails is logged, with its traceback."""
    logging.getLogger("dango").setLevel(logging.CRITICAL)


def in_world(
    test: Callable[[World], Awaitable[None]], admission: Literal["none", "survival"] = "survival", **more: object
) -> None:
    plan = a_plan()
    config = ConductorConfig(
        block_tokens=plan.conductor.block_tokens,
        context_tokens=plan.context_tokens,
        in_flight_max=IN_FLIGHT_MAX,
        admission=admission,
        rests_on_decode=False,  # each prompt shall meet the pool that fails
    )
    plan = replace(plan, conductor=config, segment_blocks=200)

    async def main() -> None:
        world = World(changed(plan, **more))
        await world.start()
        await test(world)
        await world.close()

    run_virtual(main())


def changed(plan: Plan, **more: object) -> Plan:
    return replace(plan, **more)  # type: ignore[arg-type]


class Breaker:
    """Makes every pass of one instance's engine fail, until `mend`."""

    def __init__(self, world: World, name: str) -> None:
        engine = world.members[name].engine
        assert engine is not None
        self.engine = engine
        self.passes = 0
        engine.begin = engine.step = engine.run = self._fail  # type: ignore[assignment,method-assign]

    def _fail(self, *_: object) -> None:
        self.passes += 1
        raise RuntimeError("this machine is broken")

    def mend(self) -> None:
        """From now on it is well."""
        del self.engine.begin, self.engine.step, self.engine.run


async def end_of(world: World, client: Client, number: int) -> Told:
    """What one client heard, to the end. Asserts that it heard one end, and nothing wrong."""
    told = Told(client)
    try:
        await world.serve(Ask(RequestId(f"r{number}"), client.prompt, client.samplings), told)
        told.ending = Ending.FINISHED
    except Refused as refused:
        told.ending, told.reason = Ending.REFUSED, refused.refusal.reason
    except Failed as failed:
        told.ending, told.reason = Ending.FAILED, str(failed)
    told.check()
    return told


async def one_after_another(world: World, numbers: Sequence[int]) -> list[Told]:
    return [await end_of(world, probe(number), number) for number in numbers]


async def all_at_once(world: World, numbers: Sequence[int]) -> list[Told]:
    return await asyncio.gather(*(end_of(world, probe(number), number) for number in numbers))


def endings(told: Sequence[Told]) -> set[Ending | None]:
    return {one.ending for one in told}


def counted(world: World, name: str, **labels: str) -> float:
    value = world.metrics.registry.get_sample_value(name, {"model_name": "simulated", **labels})
    assert value is not None
    return value


def ejected(world: World, name: str) -> bool:
    instance = world.view.find(InstanceId(name))
    assert instance is not None
    return world.view.health.ejected(instance.incarnation)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_an_instance_that_accepts_and_always_fails_is_ejected_and_probed_back(name: str) -> None:
    async def main(world: World) -> None:
        broken = Breaker(world, name)
        assert endings(await one_after_another(world, range(12))) == {Ending.FINISHED}
        assert broken.passes == FAILURES_MAX, "then nothing more was placed there"
        assert ejected(world, name)
        await asyncio.sleep(OUT_S)
        assert endings(await all_at_once(world, range(20, 24))) == {Ending.FINISHED}
        assert broken.passes == FAILURES_MAX + 1, "one of them was the probe"
        broken.mend()
        assert endings(await one_after_another(world, range(30, 34))) == {Ending.FINISHED}
        assert ejected(world, name), "it is too early for another probe"
        await asyncio.sleep(2 * OUT_S)
        computed_s = broken.engine.computed_s
        assert endings(await one_after_another(world, range(40, 44))) == {Ending.FINISHED}
        assert not ejected(world, name)
        assert broken.engine.computed_s > computed_s
        pool = name.partition("-")[0]
        assert counted(world, "dango:ejections_total", pool=pool) == 2
        assert counted(world, "dango:replacements_total") == FAILURES_MAX + 1
        await asyncio.sleep(1.0)
        check_rest(world)

    in_world(main)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_of_many_at_once_each_has_one_answer_and_two_attempts_at_most(name: str) -> None:
    async def main(world: World) -> None:
        Breaker(world, name)
        assert endings(await all_at_once(world, range(16))) == {Ending.FINISHED}
        assert counted(world, "dango:placements_total") <= 2 * 16
        assert counted(world, "dango:replacements_total") <= 16

    in_world(main)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_where_everything_fails_second_attempts_are_a_share_of_the_requests(pool: str) -> None:
    async def main(world: World) -> None:
        for number in range(2):
            Breaker(world, f"{pool}-{number}")
        requests = 4 * IN_FLIGHT_MAX
        told = await one_after_another(world, range(requests))
        assert endings(told) == {Ending.FAILED}, (
            "ejecting all is ejecting none: nobody is told that nobody is there"
        )
        second = counted(world, "dango:placements_total") - requests
        assert second == counted(world, "dango:replacements_total")
        assert second <= IN_FLIGHT_MAX + SHARE * requests
        assert counted(world, "dango:replacements_denied_total") == requests - second > 0

    in_world(main)


def test_prompts_that_fit_nowhere_lower_no_instances_state() -> None:
    async def main(world: World) -> None:
        long = Client(0.0, probe(0).prompt * 2, probe(0).samplings, expected=[[]])
        for number in range(50):
            assert (await end_of(world, long, number)).ending is Ending.FAILED
        assert not world.view.health
        assert counted(world, "dango:replacements_total") == 0
        assert endings(await one_after_another(world, range(60, 64))) == {Ending.FINISHED}

    in_world(main, prefill_pages=80 // a_plan().conductor.block_tokens)


@pytest.mark.parametrize("pool", [Pool.PREFILL, Pool.DECODE])
def test_a_full_instance_is_back_pressure_and_no_fault(pool: Pool) -> None:
    async def main(world: World) -> None:
        told = await all_at_once(world, range(30))
        turned_away = [one for one in told if one.ending is not Ending.FINISHED]
        assert 0 < len(turned_away) < 30
        if pool is Pool.PREFILL:
            assert {(one.ending, one.reason) for one in turned_away} == {(Ending.REFUSED, "pool_full")}
        assert not world.view.health
        assert counted(world, "dango:replacements_total") == 0
        assert endings(await one_after_another(world, range(40, 44))) == {Ending.FINISHED}

    plan = a_plan()
    small = {
        Pool.PREFILL: {"prefill": replace(plan.prefill, queue_max=2)},
        Pool.DECODE: {"decode": replace(plan.decode, queue_max=2)},
    }
    in_world(main, admission="none", **small[pool])  # else nobody goes where it is full
