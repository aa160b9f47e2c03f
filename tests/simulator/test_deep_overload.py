"""B41: ten times what can be served, half of it long prompts, for a minute of virtual time; then nearly nothing.

Who finds the line full hears so at once. Who is held hears of its refusal when its limit is out of reach.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from conductor.admission import TICK_S
from conductor.ask import Ask, Limits, Refusal, Refused
from conductor.problem import refused
from engine.api import Sampling
from protocol.ids import RequestId
from simulator.drive import DEADLINE_S, Watch
from simulator.engine import END
from simulator.loop import run_virtual
from simulator.plan import plan_of
from simulator.record import gap_figures
from simulator.setup import Setup
from simulator.synthetic import LogNormal, Phase, synthesize
from simulator.workload import Arrival, prompt_ids
from simulator.world import World

LIMITS = Limits(ttft_s=8.0, tbt_s=0.03)
HELD_MAX, HELD_TOKENS_MAX, IN_FLIGHT_MAX = 64, 120_000, 256
FLOOD_S, AFTER_S = 60.0, 20.0
AT_ONCE_S = 0.1
PREDICTED_WITHIN = 0.01
"""The last ones that are let in are predicted to come just in time."""

BACK_S = 10.0
"""So long after the flood all is as before it."""

SHORT, LONG, ANSWER = LogNormal(500, 0.5), LogNormal(4000, 0.5), LogNormal(300, 0.5)
CAPACITY = 4.0
"""Requests a second of these that one prefill and one decode instance serve; both pools are full then."""


@dataclass
class Client:
    """How one request ended."""

    at_s: float
    """Of its arrival, in the flood."""
    lasted_s: float
    ttft_s: float
    """Infinite without a token."""
    tbt_s: float
    refusal: Refusal | None

    @property
    def within(self) -> bool:
        return self.refusal is None and self.ttft_s <= LIMITS.ttft_s and self.tbt_s <= LIMITS.tbt_s


@dataclass
class Flood:
    """What became of all, and the most that was ever held."""

    clients: list[Client]
    held: float
    held_tokens: float
    in_flight: float

    def goodput(self) -> float:
        """Requests a second that were served within both limits, of those that came in the flood."""
        return sum(client.within for client in self.clients if client.at_s < FLOOD_S) / FLOOD_S


def traffic(rate: float) -> list[Arrival]:
    """Short and long prompts, equally many."""
    halves = []
    for number, length in enumerate((SHORT, LONG)):
        phases = (Phase(FLOOD_S, rate / 2, length, ANSWER), Phase(AFTER_S, CAPACITY / 8, length, ANSWER))
        arrivals = synthesize(phases, Random(f"half {number}"))
        halves += [replace(one, blocks=[2 * block + number for block in one.blocks]) for one in arrivals]
    return sorted(halves, key=lambda one: one.at_s)


async def _served(world: World, number: int, arrival: Arrival) -> Client:
    loop, cost, refusal = asyncio.get_running_loop(), world.plan.cost, None
    watch = Watch(arrival.tokens * cost.kv_bytes_token / cost.network_bytes_s)
    sampling = Sampling(
        seed=arrival.output, max_tokens=world.plan.context_tokens - arrival.tokens, stop_tokens=[END]
    )
    prompt = prompt_ids(arrival, world.layout.block_tokens)
    began = loop.time()
    try:
        ask = Ask(RequestId(f"r{number}"), prompt, [sampling], within_s=DEADLINE_S, limits=LIMITS)
        await world.dispatcher.serve(ask, watch)
    except Refused as error:
        refusal = error.refusal
    ttft_s = math.inf if watch.first_at is None else watch.first_at - began
    return Client(arrival.at_s, loop.time() - began, ttft_s, gap_figures(watch.gaps)[1], refusal)


async def _flooded(world: World, arrivals: Sequence[Arrival]) -> Flood:
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[Client]]()
    flood, began = Flood([], 0.0, 0.0, 0.0), loop.time()

    def shown(name: str) -> float:
        value = world.metrics.registry.get_sample_value(name, {"model_name": "simulated"})
        assert value is not None
        return value

    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(max(began + arrival.at_s - loop.time(), 0.0))
        tasks.append(asyncio.create_task(_served(world, number, arrival)))
        flood.held = max(flood.held, shown("dango:held_requests"))
        flood.held_tokens = max(flood.held_tokens, shown("dango:held_tokens"))
        flood.in_flight = max(flood.in_flight, sum(not task.done() for task in tasks[-2 * IN_FLIGHT_MAX :]))
    flood.clients = await asyncio.gather(*tasks)
    return flood


def flood_of(rate: float) -> Flood:
    arrivals = traffic(rate)
    plan = plan_of(Setup(prefill=1, decode=1, report_s=0.5, tbt_limit_s=LIMITS.tbt_s), arrivals)
    bounds = {"held_max": HELD_MAX, "held_tokens_max": HELD_TOKENS_MAX, "in_flight_max": IN_FLIGHT_MAX}
    plan = replace(plan, conductor=replace(plan.conductor, **bounds))

    async def main() -> Flood:
        world = World(plan)
        await world.start()
        try:
            return await _flooded(world, arrivals)
        finally:
            await world.close()

    return run_virtual(main())


@pytest.fixture(scope="module")
def flood() -> Flood:
    return flood_of(10 * CAPACITY)


def test_what_waits_is_bounded_by_number_and_by_tokens(flood: Flood) -> None:
    assert 0.9 * HELD_MAX < flood.held <= HELD_MAX or flood.held_tokens > 0.9 * HELD_TOKENS_MAX
    assert flood.held <= HELD_MAX
    assert flood.held_tokens <= HELD_TOKENS_MAX
    assert flood.in_flight <= IN_FLIGHT_MAX


def test_refusals_come_at_once_or_when_a_hold_ends_with_when_to_come_back(flood: Flood) -> None:
    no = [client for client in flood.clients if client.refusal is not None]
    at_once = [client for client in no if client.lasted_s <= AT_ONCE_S]
    assert len(no) > 0.8 * 9 / 10 * len(flood.clients)
    assert len(at_once) > 0.5 * len(no)
    assert all(client.lasted_s <= LIMITS.ttft_s + TICK_S + AT_ONCE_S for client in no)
    problems = [refused(client.refusal) for client in no if client.refusal is not None]
    assert {problem.status for problem in problems} == {429}
    assert all(int(problem.headers["Retry-After"]) >= 1 for problem in problems)


def test_who_is_let_in_has_its_first_token_in_time(flood: Flood) -> None:
    ttfts = sorted(client.ttft_s for client in flood.clients if client.refusal is None)
    assert ttfts[math.ceil(0.95 * len(ttfts)) - 1] <= LIMITS.ttft_s * (1 + PREDICTED_WITHIN)


def test_soon_after_the_flood_everything_is_served_at_once(flood: Flood) -> None:
    late = [client for client in flood.clients if client.at_s > FLOOD_S + BACK_S]
    assert len(late) >= 5
    assert all(client.within and client.ttft_s < 2.0 for client in late)


def test_a_flood_costs_little_of_what_is_served_without_one(flood: Flood) -> None:
    assert flood.goodput() >= 0.8 * flood_of(CAPACITY).goodput()
