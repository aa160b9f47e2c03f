"""Whether, when and where: the Conductor's judgement of a request, and the waiting of those who must wait.

    arrival ── place, judge ──> admitted ── prefill ── hand over ──> its decode instance
                 │     ^                                  └ policy at_decode: waits here too, or is refused
               held ───┘ whenever something has changed
                 └──> refused, when its limit is out of reach

A decision and its entry in the ledger are made in one breath: the next decision must see it.
"""

import asyncio
import contextlib
import math
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from conductor.admit import RETRY_GRID_S, Candidate, Gate, Verdict
from conductor.admitted import Admitted, Wanted
from conductor.ask import Limits, Priority, Refusal, Refused
from conductor.computed import Computed
from conductor.config import ConductorConfig
from conductor.estimate import Estimates
from conductor.lengths import Lengths
from conductor.line import Held, Line, held_of, may_bar
from conductor.load import pool_load
from conductor.metrics import Metrics
from conductor.place import Placement, Scene, place
from conductor.rest import Rest, rest_on_decode
from conductor.rules import AT_DECODE, Rules
from conductor.view import Instance, View
from kvcache_pool.api import Found
from protocol.ids import RequestId
from protocol.registry import Pool

WALK_EVERY_S = 0.02
"""At most so often are those who wait looked at, however much happens."""

TICK_S = 0.25
"""So often they are looked at although nothing seems to have happened: predictions change with time."""

MISSES_MAX = 16
"""Of those that bar, and of those that do not, no more are tried in a walk when so many did not fit: those behind
them, which are longer or ask for more, hardly will. Whose last moment to begin has come is counted apart."""

SETTLED_MAX = 32
"""No more are admitted or refused in one walk, each of which takes about a millisecond: the next walk comes in a
moment, and all that the Conductor does besides goes on meanwhile."""

SHOW_EVERY_S = 1.0
"""How old the loads that metrics show may be."""

LOOKUP_EVERY_S = 2.0
"""How old a held request's knowledge of the cache may become."""

FULL_RETRY_S = 1.0
"""When to come back to a full line at the soonest: it moves in about this time."""

NOTHING = Found(0, {})
"""A prompt of which nothing is cached, or nobody can say so."""

DRAINING = "the service is shutting down"

Lookup = Callable[[], Awaitable[Found | None]]
"""How much of a prompt is cached, and where; None: there was no answer."""


@dataclass
class _Waiting:
    """One that is held: what it wants, what it knows of the cache, and who is told."""

    wanted: Wanted
    held: Held
    found: Found
    told: asyncio.Future[Admitted]


class Admission:
    """Judges, holds, and enters what it admits. `run` must go on beside the requests."""

    def __init__(self, view: View, metrics: Metrics, config: ConductorConfig, dice: random.Random) -> None:
        self.estimates = Estimates()
        self.lengths = Lengths()
        self.gate = Gate(rules_of(config))
        self.placement: str = config.placement
        """A name in PLACEMENTS; may change at any time."""
        self._view = view
        self._metrics = metrics
        self._threshold = config.balancing_threshold
        self._rest_steps_max = config.rest_steps_max if config.rests_on_decode else 0
        self._dice = dice
        self._line = Line(
            held_max=config.held_max,
            tokens_max=config.held_tokens_max,
            overtaken_max=config.overtaken_max,
            age_s=config.batch_age_s,
            rescue_share=config.rescue_share,
        )
        self._waiting: dict[RequestId, _Waiting] = {}
        self._computed = Computed(view, self.gate, self.estimates, self.lengths, self.poke, self._bars)
        self._changed = asyncio.Event()
        self._limits = Limits(config.ttft_limit_s or math.inf, config.tbt_limit_s or math.inf)
        self._shown_at = -math.inf

    @property
    def held(self) -> int:
        """Requests that wait before their prefill."""
        return len(self._line)

    def pool_loads(self, limits: Limits) -> tuple[float, float]:
        """Load of the prefill and of the decode pool: predicted latency over its limit."""
        loads = [
            pool_load(self._view, self.estimates, pool, limits, _now()) for pool in (Pool.PREFILL, Pool.DECODE)
        ]
        return loads[0], loads[1]

    def poke(self) -> None:
        """Something has changed: those who wait may fit now."""
        self._changed.set()

    async def run(self) -> None:
        """Look at those who wait whenever something has changed, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S if self._waiting or self._computed else SHOW_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()
            self._show_loads()
            self._computed.walk()
            self._walk_held()
            await asyncio.sleep(WALK_EVERY_S)

    def drain(self) -> None:
        """Refuse all that are held: the Conductor is about to end."""
        for waiting in list(self._waiting.values()):
            self._line.remove(waiting.wanted.request)
            if not waiting.told.done():
                waiting.told.set_exception(Refused(Refusal("draining", DRAINING, FULL_RETRY_S)))
        self._waiting.clear()

    def check(self) -> None:
        """Asserts that whoever is in the line waits, and nobody else."""
        self._line.check()
        assert len(self._waiting) == len(self._line)
        assert all(request in self._line for request in self._waiting)

    # -- before the prefill -----------------------------------------------------------------------

    async def admit(self, wanted: Wanted, lookup: Lookup) -> Admitted:
        """Judge; hold if need be. Enter the returned context manager at once. Raises Refused."""
        self.gate.observe_prompt(wanted.prompt.tokens)
        found, now = await lookup() or NOTHING, _now()
        plan = self._place(wanted, found, now)
        held = self._held(wanted, plan)
        if wanted.promised or self._line.may_pass(held, now):
            admitted = self._judge(wanted, found, plan, held, now)
            if admitted is not None:
                return admitted
        return await self._hold(_Waiting(wanted, held, found, asyncio.get_running_loop().create_future()), lookup)

    def _scene(self, now: float) -> Scene:
        return Scene(self._view, self.estimates, now, self._dice.randrange, self._threshold)

    def _place(self, wanted: Wanted, found: Found, now: float) -> Placement:
        """Where it would go. Raises Refused."""
        plan = place(self._scene(now), wanted.prompt, found, self.placement)
        if isinstance(plan, Refusal):
            raise Refused(plan)
        return plan

    def _judge(self, wanted: Wanted, found: Found, plan: Placement, held: Held, now: float) -> Admitted | None:
        """Admit, and enter it in the ledger; None if it must be held. Raises Refused.

        `now` is when the line was asked whether it may be judged: the line may be another a moment later."""
        waits, yields = held.key in self._line, self._line.yields(held, now)
        candidate = Candidate(
            wanted.prompt.tokens,
            wanted.priority,
            wanted.limits,
            wanted.arrived_at,
            queue_s=plan.queue_s,
            compute_s=plan.work_s,
            kind=plan.prefill.kind,
            choices=len(wanted.choices),
            held=waits,
            avoid=wanted.prompt.avoid,
            yields=yields,
            aged=wanted.priority is Priority.BATCH and not yields,
            waiting=len(self._line) - waits,
            waiting_tokens=self._line.tokens - waits * held.tokens,
        )
        if self.gate.closed:
            self.gate.reopen(self._present())
        judge = self.gate.best if wanted.promised else self.gate.judge
        judgement = judge(candidate, self._view, self.estimates, self.lengths, now)
        if judgement.verdict is Verdict.HOLD:
            return None
        if judgement.verdict is Verdict.REFUSE:
            raise Refused(judgement.refusal(429))
        assert judgement.decode is not None, "a pool without an instance was refused before"
        if wanted.promised:
            self._line.remove(held.key)
        else:
            self._line.admitted(held, now)
        rest = self._rest(self._scene(now), wanted, found, plan, judgement.decode)
        return Admitted(self._view, wanted, plan, judgement.decode, _now, self.poke, rest)

    def _rest(self, scene: Scene, wanted: Wanted, found: Found, plan: Placement, decode: Instance) -> Rest | None:
        """What the decode instance computes itself; None if the prompt goes through prefill. So it does for
        several choices, which share one prefill, and where decode is judged only after it."""
        if not self._rest_steps_max or len(wanted.choices) > 1 or self.gate.rules.policy == AT_DECODE:
            return None
        return rest_on_decode(scene, wanted.prompt, found, plan, decode, wanted.limits, self._rest_steps_max)

    def _held(self, wanted: Wanted, plan: Placement) -> Held:
        """Its place in the line."""
        whole_s = self.estimates.prefill_s(plan.prefill.kind, wanted.prompt.tokens, 0)
        return held_of(wanted, plan, whole_s, self._limits)

    def _bars(self, limits: Limits) -> bool:
        return may_bar(limits, self._limits)

    def _present(self) -> set[Priority]:
        """Classes of which somebody is held, on the way to decode, or there."""
        decodes = self._view.of(Pool.DECODE)
        return self._line.classes | {stream.priority for one in decodes for stream in one.streams.values()}

    async def _hold(self, waiting: _Waiting, lookup: Lookup) -> Admitted:
        """Stand in the line until a walk admits or refuses this request. Raises Refused."""
        wanted, told, began = waiting.wanted, waiting.told, _now()
        pushed = self._line.add(waiting.held, began)
        if pushed is None:
            raise Refused(self._full())
        for other in pushed:
            self._waiting.pop(other.key).told.set_exception(Refused(self._full()))
        self._waiting[wanted.request] = waiting
        self._show_line()
        self.poke()
        refresh = asyncio.create_task(_refresh(waiting, lookup))
        try:
            await asyncio.wait([told])
            return told.result()
        except BaseException:
            if told.done() and not told.cancelled() and told.exception() is None:
                told.result().close()  # admitted in the moment in which its client left
            raise
        finally:
            refresh.cancel()
            self._line.remove(wanted.request)
            self._waiting.pop(wanted.request, None)
            self._metrics.observe_hold(_now() - began)
            self._show_line()

    def _walk_held(self) -> None:
        """Admit those that fit by now. Where one does not fit, none behind it does that asks for as much: they are
        passed over. One that is tried first since its last moment has come says nothing of those before which it
        is tried: they may be in decode much sooner."""
        now, settled, misses = _now(), 0, Counter[tuple[bool, bool]]()
        self._end_overdue(now)
        shortest: dict[tuple[Priority, float, int, bool], int] = {}
        for held in self._line.candidates(now):
            wanted, last_call = self._waiting[held.key].wanted, held.rescue_at <= now
            alike = wanted.priority, wanted.limits.tbt_s, len(wanted.choices), last_call
            if misses[held.bars, last_call] >= MISSES_MAX or held.tokens >= shortest.get(alike, sys.maxsize):
                continue
            if settled == SETTLED_MAX:
                return self.poke()
            if self._settled(held, now):
                settled += 1
            else:
                shortest[alike] = held.tokens
                misses[held.bars, last_call] += 1

    def _settled(self, held: Held, now: float) -> bool:
        """Try one that is held: True if it has been admitted or refused."""
        waiting = self._waiting[held.key]
        try:
            plan = self._place(waiting.wanted, waiting.found, now)
            admitted = self._judge(waiting.wanted, waiting.found, plan, held, now)
        except Refused as refused:
            self._line.remove(held.key)
            waiting.told.set_exception(refused)
        else:
            if admitted is None:
                return False
            waiting.told.set_result(admitted)
        del self._waiting[held.key]
        return True

    def _end_overdue(self, now: float) -> None:
        """Refuse those whose limit is out of reach, wherever they stand."""
        for held in self._line.expired(now):
            waiting = self._waiting.pop(held.key)
            waited_s, limits = now - waiting.wanted.arrived_at, waiting.wanted.limits
            text = f"There was no room for it in the {waited_s:.3g} s that it has waited"
            refusal = Refusal("tbt", text, self._retry_s(), 429, ttft_s=waited_s, limits=limits)
            waiting.told.set_exception(Refused(refusal))

    def _full(self) -> Refusal:
        text = f"{len(self._line)} requests wait already, as many as are allowed"
        return Refusal("queue_full", text, self._retry_s(), 429)

    def _retry_s(self) -> float:
        """When those who are held now will have gone: who comes back stands behind them."""
        drain_s = self.gate.drain_s(self._view, len(self._line), self._line.tokens)
        return min(max(drain_s, FULL_RETRY_S), RETRY_GRID_S[-1])

    # -- after the prefill ------------------------------------------------------------------------

    async def hand_over(self, admitted: Admitted, choice: int) -> Instance:
        """Which decode instance goes on with this choice; it is entered there.

        Raises Refused: by policy at_decode, or since no decode instance is alive."""
        return await self._computed.hand_over(admitted, choice)

    def joined(self, admitted: Admitted, choice: int) -> float:
        """Its KV has arrived: it decodes from now on. Returns what the next step there is predicted to take."""
        instance = admitted.joined(choice)
        step_s = self.estimates.step(instance.kind).at(*instance.batch)
        return step_s + instance.next_rest_s(step_s, _now())

    def ended(self, admitted: Admitted, choice: int, tokens: int) -> None:
        """An answer is complete, with so many tokens: what is known of lengths grows by one."""
        stream = admitted.stream(choice)
        if stream is not None and stream.joined_at is not None:
            self.gate.observe_residence(_now() - stream.joined_at)
        self.lengths.observe(admitted.wanted.priority, tokens)
        admitted.gone(choice)

    def cut(self, admitted: Admitted, choice: int, tokens: int) -> None:
        """An answer ended before its time, after so many tokens: its client left, or its instance died."""
        if tokens:
            self.lengths.censored(admitted.wanted.priority, tokens)
        admitted.gone(choice)

    def _show_loads(self) -> None:
        if _now() >= self._shown_at + SHOW_EVERY_S:
            self._shown_at = _now()
            for pool, load in zip((Pool.PREFILL, Pool.DECODE), self.pool_loads(self._limits), strict=True):
                self._metrics.judged(pool, load)

    def _show_line(self) -> None:
        self._metrics.set_held(len(self._line), self._line.tokens)


def rules_of(config: ConductorConfig) -> Rules:
    """How to judge, as it is configured."""
    return Rules(
        policy=config.admission,
        reserve=config.reserve,
        hold=config.hold,
        z=config.reserve_z,
        margin=config.margin,
        hysteresis=config.hysteresis,
        samples_min=config.samples_min,
        residence_s=config.residence_s,
        batch_share=config.batch_share,
    )


async def _refresh(waiting: _Waiting, lookup: Lookup) -> None:
    """Keep what a held request knows of the cache young, until cancelled."""
    while True:
        await asyncio.sleep(LOOKUP_EVERY_S)
        waiting.found = await lookup() or waiting.found


def _now() -> float:
    return asyncio.get_running_loop().time()
