"""How long the Conductor takes to decide about one request: where its prompt goes, and whether it fits in decode.

No service is started: what decides is pure, and the cluster is made up, as large and as busy as a Conductor should
bear. There is one Conductor, and while it decides, everybody waits: so this must be short.
"""

import random
import time
from typing import NamedTuple

from bench.report import Row, Spread
from bench.setup import Setup
from conductor.admit import Candidate, Gate, Judgement
from conductor.ask import Limits, Priority
from conductor.estimate import Estimates
from conductor.lengths import Lengths
from conductor.place import Placement, Prompt, Scene, place
from conductor.rules import Rules
from conductor.view import Prefilling, Stream, View
from kvcache_pool.api import Found
from protocol.cluster import Manifest
from protocol.ids import Incarnation, InstanceId, RequestId
from protocol.registry import Load, Pool, Register, Timing
from simulator.cost import MODELS
from simulator.world import layout_of

ABOUT = "one decision of the Conductor, placement and judgement, among 64 + 64 busy instances"

DECISION_MS_MAX = 1.0
"""A thousand decisions a second: many times what such a cluster serves, so decisions take little of one core."""

DECISIONS = 200
"""In one run."""

INSTANCES = 64
"""Of each pool; a segment beside each prefill instance."""

QUEUED = 3
"""Prompts of a prefill instance."""

STREAMS, COMING = 40, 4
"""Of a decode instance; so many of them are still in prefill."""

DUE_MAX_S = 60.0
"""Until then these are due, some before the prompt that is decided about and some after it."""

CONTEXT_MAX = 16_000
"""Tokens of a stream's prompt."""

TOKENS, BLOCK_TOKENS = 100_000, 512
"""Of the prompt that is decided about, and of a block."""

FOUND = Found(120, {"kvcache-03": 120, "kvcache-17": 64, "kvcache-40": 64, "kvcache-58": 7})
"""What of the prompt is cached, and where."""

ANSWERS, ANSWER_MEDIAN, ANSWER_SIGMA = 2000, 5.5, 1.0
"""Answers whose lengths are known; the logarithm of a length is normally distributed."""

LIMITS = Limits(ttft_s=60.0, tbt_s=0.1)
COST = MODELS["llama3-70b-a800"]


class Took(NamedTuple):
    """Milliseconds of one request's decisions."""

    placement: float
    judgement: float
    hand_over: float


async def run(setup: Setup) -> list[Row]:
    """Measure the time of this process, whatever others take of the machine."""
    desk = Desk(setup.dice())
    took = [desk.decide(1.0 + number / 100) for number in range(DECISIONS * setup.runs)]
    both = [one.placement + one.judgement for one in took]
    return [
        Row("decision", "ms", Spread.of(both), limit=DECISION_MS_MAX),
        Row("  of that placement", "ms", Spread.of([one.placement for one in took])),
        Row("  of that judgement", "ms", Spread.of([one.judgement for one in took])),
        Row("choice of decode at the hand-over", "ms", Spread.of([one.hand_over for one in took])),
    ]


class Desk:
    """What the Conductor believes and has learnt, and who decides by it."""

    plan: Placement
    """The last one."""
    judgement: Judgement
    """Likewise."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._view = a_busy_view(dice)
        self._estimates = Estimates()
        self._lengths = Lengths()
        self._gate = Gate(Rules())
        self._passes = 0
        for _ in range(ANSWERS):
            self._learn(0.0)

    def decide(self, now: float) -> Took:
        """Once, after some more has been learnt."""
        self._learn(now)
        scene = Scene(self._view, self._estimates, now, self._dice.randrange)
        known, clock = (self._view, self._estimates, self._lengths, now), time.process_time
        began = clock()
        plan = place(scene, Prompt(TOKENS, (TOKENS - 1) // BLOCK_TOKENS), FOUND, "global_cache_aware")
        placed = clock()
        assert isinstance(plan, Placement)
        times = plan.queue_s, plan.work_s, plan.prefill.kind
        candidate = Candidate(TOKENS, Priority.INTERACTIVE, LIMITS, now, *times)
        judgement = self._gate.judge(candidate, *known)
        judged = clock()
        self._gate.hand_over(candidate, *known)
        handed = clock()
        self.plan, self.judgement = plan, judgement
        return Took(1000 * (placed - began), 1000 * (judged - placed), 1000 * (handed - judged))

    def _learn(self, now: float) -> None:
        """A pass of each pool, and the length of an answer."""
        self._passes += 1
        dice = self._dice
        tokens, prefix = dice.randint(1, 8192), dice.randint(0, TOKENS)
        rows, context = dice.randint(1, STREAMS), dice.randint(1, STREAMS * CONTEXT_MAX)
        prefill = Timing(self._passes, tokens, prefix, COST.prefill_s(tokens, prefix))
        step = Timing(self._passes, rows, context, COST.step_s(rows, context))
        for pool, timing in ((Pool.PREFILL, prefill), (Pool.DECODE, step)):
            self._estimates.learn(pool, pool.value, Incarnation(pool.value), [timing], now)
        length = round(dice.lognormvariate(ANSWER_MEDIAN, ANSWER_SIGMA))
        self._lengths.observe(Priority.INTERACTIVE, max(length, 1))


def a_busy_view(dice: random.Random) -> View:
    """Every instance has reported, and has as much to do as it says above."""
    view = View(Manifest("bench", "digest", "digest", 2 * TOKENS, layout_of(COST, BLOCK_TOKENS)))
    for pool in Pool:
        for number in range(INSTANCES):
            _join(view, pool, number)
    for instance in view.of(Pool.PREFILL):
        for number in range(QUEUED):
            tokens = dice.randint(1, CONTEXT_MAX)
            work = Prefilling(tokens, 0, COST.prefill_s(tokens, 0), 0.0)
            view.enter(instance, (RequestId(f"{instance.name} {number}"), 0), work)
    for instance in view.of(Pool.DECODE):
        for number in range(STREAMS):
            key = RequestId(f"{instance.name} {number}"), 0
            view.enter(
                instance, key, Stream(dice.randint(1, CONTEXT_MAX), dice.uniform(0, DUE_MAX_S), tbt_s=LIMITS.tbt_s)
            )
            if number >= COMING:
                view.joined(instance, key, -dice.uniform(0, 20))
                view.said(instance, key, dice.randint(1, 500), 0.0)
    return view


def _join(view: View, pool: Pool, number: int) -> None:
    name, life = InstanceId(f"{pool.value}-{number:02}"), Incarnation(f"{pool.value} {number}")
    host = f"d{number}" if pool is Pool.DECODE else f"p{number}"
    keeps = pool is Pool.KVCACHE and number == 0
    view.register(Register(name, life, pool, f"at {name}", host, view.manifest, keeps, pool.value), 0.0)
    running = STREAMS - COMING if pool is Pool.DECODE else 0
    pages = COST.pages_tokens // BLOCK_TOKENS
    load = Load(running=running, waiting=COMING, blocks_total=pages, step_s=COST.step_s(running, 0))
    view.report(name, life, load, 0.0)
