"""The requests of a workload, served by a world and watched: when each token came, and how each request ended."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from conductor.ask import Ask, Failed, Limits, Refused
from decode_pool.api import Tokens
from engine.api import EndReason, Sampling
from protocol.ids import RequestId
from protocol.registry import Pool
from simulator.engine import END
from simulator.hot import Hot
from simulator.loop import run_virtual
from simulator.plan import plan_of
from simulator.record import Outcome, Series, gap_figures
from simulator.setup import Setup
from simulator.workload import Arrival, prompt_ids
from simulator.world import Plan, World

DEADLINE_S = 3600.0
"""Of a simulated request: its limits refuse it long before."""


class Watch:
    """A conductor.ask.Reply that keeps times instead of text."""

    def __init__(self, transfer_s: float) -> None:
        """`transfer_s`: what moving the prompt's KV to decode takes at the least."""
        self._transfer_s = transfer_s
        self.admitted_at: float | None = None
        self.reused: int | None = None
        """Tokens; None until the prompt is computed."""
        self.first_at: float | None = None
        self.hand_over_s: float | None = None
        """The gap before the second token: moving the KV, waiting for memory and a step; 0 if nothing is moved."""
        self.last_at = 0.0
        self.count = 0
        self.gaps: list[tuple[float, int]] = []

    def admitted(self) -> None:
        """See Reply."""
        if self.admitted_at is None:
            self.admitted_at = _now()

    def prefilled(self, reused_tokens: int) -> None:
        """See Reply."""
        self.reused = reused_tokens

    async def tokens(self, choice: int, said: Tokens) -> bool:
        """See Reply. The last token of a message came now, each other one a step before the next."""
        now, first_s, *others_s = _now(), *said.took_s
        gap_s = max(now - sum(others_s) - self.last_at, 0.0)
        if self.first_at is None:
            self.first_at = now
            if first_s:
                self.hand_over_s = 0.0  # a decode instance drew it: nothing is moved after it
        elif self.hand_over_s is None:
            self.hand_over_s = gap_s
            self.gaps.append((max(gap_s - self._transfer_s - first_s, 0.0), 1))
        else:
            self.gaps.append((gap_s, 1))
        self.gaps.extend((seconds, len(list(equal))) for seconds, equal in groupby(others_s))
        self.last_at = now
        self.count += len(said.tokens)
        return True

    async def end(self, choice: int, reason: EndReason) -> None:
        """See Reply."""


@dataclass
class Run:
    """What a simulation gives."""

    setup: Setup
    outcomes: list[Outcome] = field(default_factory=list)
    """In the order of arrival."""
    series: Series = field(default_factory=Series)
    messages: int = 0
    """Sent over the network."""


class Driver:
    """Sends arrivals to a world's dispatcher, and samples its state each second."""

    def __init__(self, world: World, setup: Setup, arrivals: Sequence[Arrival]) -> None:
        self._world = world
        self._setup = setup
        self._arrivals = arrivals
        self._began = 0.0
        self._refused = 0
        self._wasted_s = 0.0
        self.run = Run(setup)
        self._hot = Hot(world.manifest.root()) if setup.copies else None

    async def drive(self) -> Run:
        """Serve all; returns when the last has ended."""
        self._began = _now()
        sampler = asyncio.create_task(self._sample())
        tasks = []
        for number, arrival in enumerate(self._arrivals):
            await asyncio.sleep(max(self._began + arrival.at_s - _now(), 0.0))
            tasks.append(asyncio.create_task(self._serve(number, arrival)))
        self.run.outcomes = list(await asyncio.gather(*tasks))
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
        self.run.messages = self._world.network.messages
        return self.run

    async def _serve(self, number: int, arrival: Arrival) -> Outcome:
        cost = self._world.plan.cost
        watch = Watch(arrival.tokens * cost.kv_bytes_token / cost.network_bytes_s)
        refused = failed = ""
        await asyncio.sleep(self._world.plan.cost.request_s)
        ask = self._ask(number, arrival)
        if self._hot is not None:
            self._hot.use(ask.prompt)
        try:
            await self._world.dispatcher.serve(ask, watch)
        except Refused as error:
            refused = error.refusal.reason
            self._refused += 1
        except Failed as error:
            failed = str(error)
        outcome = self._outcome(arrival, watch, refused, failed)
        self._wasted_s += outcome.prefill_s if outcome.wasted else 0.0
        return outcome

    def _ask(self, number: int, arrival: Arrival) -> Ask:
        sampling = Sampling(
            seed=arrival.output, max_tokens=self._world.plan.context_tokens - arrival.tokens, stop_tokens=[END]
        )
        return Ask(
            RequestId(f"r{number}"),
            prompt_ids(arrival, self._world.layout.block_tokens),
            [sampling],
            within_s=DEADLINE_S,
            priority=arrival.priority,
            limits=self._limits(),
        )

    def _limits(self) -> Limits:
        return self._setup.limits

    def _outcome(self, arrival: Arrival, watch: Watch, refused: str, failed: str) -> Outcome:
        now = _now() - self._began
        tpot_s, tbt_s = gap_figures(watch.gaps)
        admitted_at = _now() if watch.admitted_at is None else watch.admitted_at
        return Outcome(
            at_s=arrival.at_s,
            tokens=arrival.tokens,
            output=watch.count,
            priority=arrival.priority,
            end_s=now,
            refused=refused,
            failed=failed,
            held_s=max(admitted_at - self._began - arrival.at_s, 0.0),
            prefill_s=0.0 if watch.reused is None else self._prefill_s(arrival.tokens, watch.reused),
            reused=watch.reused or 0,
            first_token_s=None if watch.first_at is None else watch.first_at - self._began,
            tpot_s=tpot_s,
            tbt_s=tbt_s,
            hand_over_s=watch.hand_over_s or 0.0,
        )

    def _prefill_s(self, tokens: int, reused: int) -> float:
        """What the passes of a prompt cost."""
        chunk, cost = self._world.plan.prefill.chunk_tokens, self._world.plan.cost
        starts = range(reused, tokens, chunk)
        return sum(cost.prefill_s(min(chunk, tokens - start), start) for start in starts)

    async def _sample(self) -> None:
        series, world = self.run.series, self._world
        while True:
            decodes, prefills = world.view.of(Pool.DECODE), world.view.of(Pool.PREFILL)
            series.sample(
                _now() - self._began,
                world.admission.pool_loads(self._limits()),
                sum(stream.joined_at is not None for one in decodes for stream in one.streams.values()),
                sum(len(one.prompts) for one in prefills),
                world.admission.held,
                self._refused,
                self._wasted_s,
                () if self._hot is None else self._hot.copies(world.index),
            )
            await asyncio.sleep(series.every_s)


async def served(plan: Plan, setup: Setup, arrivals: Sequence[Arrival]) -> Run:
    """The requests of a workload, by a world of their own."""
    world = World(plan)
    await world.start()
    try:
        return await Driver(world, setup, arrivals).drive()
    finally:
        await world.close()


def simulate(setup: Setup) -> Run:
    """One run, on a virtual loop of its own. Raises BadTrace, BadCostModel or OSError."""
    arrivals = setup.arrivals()
    plan = plan_of(setup, arrivals)
    gc.disable()  # a run has many objects that live long: walking them over and over costs a third of the time
    try:
        return run_virtual(served(plan, setup, arrivals))
    finally:
        gc.enable()
        gc.collect()


def _now() -> float:
    return asyncio.get_running_loop().time()
