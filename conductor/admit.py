"""Should a request be let in now, wait, or be refused? Pure: believes the view and the estimates.

             predicted TTFT within its limit?   a decode instance with room at the hand-over moment?
    judge ──── no ──> REFUSE ttft    yes ────────── yes ──> ADMIT: the promise is given
                                                    no ───> HOLD before its prefill, or REFUSE tbt

All policies share this, and differ in whom they expect in decode then (`forecast.PRESENCES`). `none` tests
nothing. `at_decode`, the baseline, tests decode only when the prefill is done (`hand_over`), and so wastes
prefills. Where too few fresh samples support a prediction, nothing is refused by it: what is not known is
not full. But what will be known in a moment is waited for.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from conductor.ask import Limits, Priority, Refusal
from conductor.estimate import Estimates
from conductor.forecast import PRESENCES, Forecast, Outlook, Presence, Ranking, survival
from conductor.lengths import Lengths
from conductor.mean import Mean
from conductor.rules import AT_DECODE, NONE, Rules
from conductor.view import STALE_REPORTS, Instance, View
from protocol.ids import Incarnation
from protocol.registry import Pool

RETRY_GRID_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Waits that a refused client may be told. Sooner, nothing has changed; later, nothing can be foretold."""

SOON_S = 0.5
"""Before its TTFT limit so long a computed prompt that was promised room goes to decode, room or not."""

NEAR_S = 1.0
"""Batch goes to prefill when its turn is this near: time enough to get there before the instance runs dry. What
stands in an instance's queue is overtaken by nobody."""

LEARN_S = 2.0
"""So old a request may get waiting for the pace of a decode instance to be known: what runs there tells it within
some steps and a report."""


class Verdict(Enum):
    """What becomes of a request at this moment."""

    ADMIT = "admit"
    HOLD = "hold"
    """Wait, and be judged again when something has changed."""
    REFUSE = "refuse"


@dataclass(frozen=True)
class Candidate:
    """A request to judge."""

    tokens: int
    """Of its prompt."""
    priority: Priority
    limits: Limits
    arrived_at: float
    queue_s: float | None = None
    """Predicted wait for its turn if it went to prefill now; None if it has no placement yet."""
    compute_s: float | None = None
    """Predicted time of its prefill, loading included; None as above."""
    kind: str = ""
    """Of the prefill instance for which those two were predicted."""
    choices: int = 1
    """Answers that it asks for."""
    held: bool = False
    """Whether it has waited for room in decode: if its time then runs out, that was the reason."""
    avoid: Collection[Incarnation] = ()
    """Lives of instances that have failed it."""
    yields: bool = False
    """Whether interactive requests shall not stand behind it: batch, but for what has waited long."""
    aged: bool = False
    """Whether it is batch that has waited so long that it counts as interactive: now that the others stand behind
    it, room that is kept for them would only keep them waiting."""
    waiting: int = 0
    """Requests that are held besides it."""
    waiting_tokens: int = 0
    """Of their prompts."""

    @property
    def prefill_s(self) -> float:
        """Predicted time to the first token, if it went to prefill now."""
        return (self.queue_s or 0.0) + (self.compute_s or 0.0)


@dataclass(frozen=True)
class Judgement:
    """A verdict, and what it rests on."""

    verdict: Verdict
    decode: Instance | None
    """Where it decodes, or has to wait for room; None if it is refused, or waits for its turn in prefill, or if no
    decode instance is alive."""
    limits: Limits
    ttft_s: float
    """Predicted, from its arrival."""
    tbt_s: float | None = None
    """Predicted for that instance with it; None if nobody looked."""
    reason: str = ""
    """`ttft` or `tbt`: the limit that would not hold (`tbt` also if memory would not do); empty if admitted."""
    text: str = ""
    """A sentence for the client; empty if it was admitted."""
    retry_after_s: float = 0.0
    """When it is worth asking again, if it was refused."""

    def refusal(self, status: int) -> Refusal:
        """The same for the client, with this HTTP status."""
        assert self.verdict is Verdict.REFUSE
        return Refusal(self.reason, self.text, self.retry_after_s, status, self.ttft_s, self.tbt_s, self.limits)


@dataclass(frozen=True)
class _Scene:
    """What one judgement looks at."""

    candidate: Candidate
    view: View
    estimates: Estimates
    lengths: Lengths
    now: float

    @property
    def decodes(self) -> list[Instance]:
        """Where it may decode."""
        return self.view.able(Pool.DECODE, self.now, self.candidate.avoid)

    @property
    def waited_s(self) -> float:
        return self.now - self.candidate.arrived_at

    @property
    def ttft_s(self) -> float:
        return self.waited_s + self.candidate.prefill_s

    @property
    def hand_over_at(self) -> float:
        return self.now + self.candidate.prefill_s


@dataclass
class Gate:
    """Judges requests one by one. Owns what it has learnt of the traffic, and which classes it holds up.

    Mutates: observe_residence, observe_prompt, reopen, judge, hand_over.
    """

    rules: Rules
    """May be exchanged while it serves."""
    _residence: Mean = field(default_factory=Mean)
    _prompt: Mean = field(default_factory=Mean)
    _closed: set[Priority] = field(default_factory=set)
    """Classes whose last request did not fit in decode."""

    def observe_residence(self, seconds: float) -> None:
        """An answer was in decode for so long."""
        self._residence.add(seconds)

    def observe_prompt(self, tokens: int) -> None:
        """A prompt of this length arrived."""
        self._prompt.add(tokens)

    @property
    def closed(self) -> bool:
        """Whether it holds up any class."""
        return bool(self._closed)

    def reopen(self, present: Collection[Priority]) -> None:
        """Hold up only classes of which somebody waits or runs: of the others nobody would ever open it."""
        self._closed &= set(present)

    def drain_s(self, view: View, requests: int, tokens: int) -> float:
        """How long it takes until so many held requests, with so many tokens in their prompts, have their place in
        decode: as long as equally much of what runs there takes to leave. 0: nobody knows yet."""
        batches = [instance.batch for instance in view.of(Pool.DECODE)]
        rows, context = sum(rows for rows, _ in batches), sum(context for _, context in batches)
        if not rows or not self._residence.samples:
            return 0.0
        return self._residence.value * max(requests / rows, tokens / max(context, 1))

    def judge(
        self, candidate: Candidate, view: View, estimates: Estimates, lengths: Lengths, now: float
    ) -> Judgement:
        """On arrival, and again for one that is held: may it go to prefill now?"""
        scene, rules = _Scene(candidate, view, estimates, lengths, now), self.rules
        if rules.policy != NONE and self._late(scene):
            return self._refuse_late(scene)
        ranked = self._ranked(scene)
        if rules.policy in (NONE, AT_DECODE):
            return _admit(scene, next(iter(ranked), None))
        if self._waits_for_prefill(candidate):
            text = f"Its turn would come in {candidate.queue_s:.3g} s: it waits where others can go before it."
            return Judgement(Verdict.HOLD, None, candidate.limits, scene.ttft_s, reason="ttft", text=text)
        return self._decide(scene, self._tested(scene, ranked), hold=rules.hold)

    def hand_over(
        self, candidate: Candidate, view: View, estimates: Estimates, lengths: Lengths, now: float
    ) -> Judgement:
        """When its prefill is done, with the candidate itself taken out of the ledger: where does it decode?

        One that does not fit as things are now waits, with its prefill done, while its TTFT limit allows it. Then
        `at_decode` refuses it. All others gave their promise on arrival: it goes where it is best.
        """
        done = replace(candidate, queue_s=None, compute_s=None)
        scene, policy = _Scene(done, view, estimates, lengths, now), self.rules.policy
        ranked = self._ranked(scene, reserve=False)
        if policy == AT_DECODE:
            tested = self._outlook(scene, PRESENCES[AT_DECODE], now).rank(scene.decodes, estimates)
            return self._decide(scene, tested, hold=not self._late(scene))
        if policy == NONE or not self.rules.hold or scene.waited_s > candidate.limits.ttft_s - SOON_S:
            return _admit(scene, next(iter(ranked), None))
        best, taker = next(iter(ranked), None), next((one for one in ranked if self._has_room(scene, one)), None)
        if taker is None and best is not None:
            return self._full(scene, best, hold=True)
        return _admit(scene, taker)

    def best(
        self, candidate: Candidate, view: View, estimates: Estimates, lengths: Lengths, now: float
    ) -> Judgement:
        """Where it decodes best, whatever the limits: part of its answer is out, so it is served to its end."""
        scene = _Scene(candidate, view, estimates, lengths, now)
        return _admit(scene, next(iter(self._ranked(scene, reserve=False)), None))

    # --- the tests

    def _decide(self, scene: _Scene, tested: Iterable[Forecast], *, hold: bool) -> Judgement:
        """To the first instance that takes it; if none does, `hold` says whether it waits or is refused."""
        best, taker = next(iter(tested), None), next((one for one in tested if self._takes(scene, one)), None)
        if taker is None and best is not None:
            if all(self._never(scene, forecast) for forecast in tested):
                return self._full(scene, best, hold=False)
            if self.rules.hysteresis:
                self._closed.add(scene.candidate.priority)
            return self._full(scene, best, hold=hold)
        self._closed.discard(scene.candidate.priority)
        return _admit(scene, taker)

    def _never(self, scene: _Scene, forecast: Forecast) -> bool:
        """Whether it does not even fit on this instance alone: no waiting mends that."""
        candidate, instance = scene.candidate, forecast.instance
        if not self._known(scene, Pool.DECODE, instance.kind):
            return False
        rows, tokens = candidate.choices, candidate.choices * self._size(candidate)
        capacity = instance.load.blocks_total * scene.view.manifest.layout.block_tokens
        alone_s = scene.estimates.step(instance.kind).at(rows, tokens)
        return alone_s > candidate.limits.tbt_s * (1.0 + self.rules.margin) or 0 < capacity < tokens

    def _size(self, candidate: Candidate) -> float:
        """Tokens of its prompt, as the test sees them."""
        blind = self.rules.size_blind and self._prompt.samples
        return self._prompt.value if blind else candidate.tokens

    def _waits_for_prefill(self, candidate: Candidate) -> bool:
        """Whether it lets others go before it until its turn in prefill is near."""
        return self.rules.hold and candidate.yields and (candidate.queue_s or 0.0) > NEAR_S

    def _late(self, scene: _Scene) -> bool:
        """Whether the TTFT limit is out of reach. Waiting does not mend it: no queue outruns the clock."""
        limit_s = scene.candidate.limits.ttft_s * (1.0 + self.rules.margin)
        if scene.waited_s > limit_s:
            return True  # no prediction, a fact
        return scene.ttft_s > limit_s and self._known(scene, Pool.PREFILL, scene.candidate.kind)

    def _takes(self, scene: _Scene, forecast: Forecast) -> bool:
        """Whether a decode instance, as foretold with the candidate in its batch, keeps the limits."""
        if not self._known(scene, Pool.DECODE, forecast.instance.kind):
            runs = any(stream.joined_at is not None for stream in forecast.instance.streams.values())
            return not (self.rules.hold and runs and scene.waited_s < LEARN_S)
        bound_s, share = self._bound(scene.candidate, forecast)
        return forecast.step_s <= bound_s and forecast.room_share <= share

    def _has_room(self, scene: _Scene, forecast: Forecast) -> bool:
        """Whether a decode instance keeps the limits with one that was promised room, of whatever class."""
        if forecast.alone or not self._known(scene, Pool.DECODE, forecast.instance.kind):
            return True
        bound_s = min(scene.candidate.limits.tbt_s, forecast.promised_s) * (1.0 + self.rules.margin)
        return forecast.step_s <= bound_s and forecast.fits

    def _bound(self, candidate: Candidate, forecast: Forecast) -> tuple[float, float]:
        """The longest step allowed, and the share of the memory. On an empty instance the plain limit: whoever
        would break that could never be served, and nobody else is there to be spared. Memory is no reason there:
        what an answer is expected to grow by is a mean, and whoever it keeps out would be kept out for ever."""
        rules, limit_s = self.rules, candidate.limits.tbt_s
        if forecast.alone:
            return limit_s * (1.0 + rules.margin), math.inf
        batch = candidate.priority is Priority.BATCH and not candidate.aged
        share = rules.batch_share if batch else 1.0
        closed = Priority.INTERACTIVE in self._closed or (batch and Priority.BATCH in self._closed)
        slack = rules.margin - (rules.hysteresis if closed else 0.0)
        return min(limit_s, forecast.promised_s) * share * (1.0 + slack), share

    def _known(self, scene: _Scene, pool: Pool, kind: str) -> bool:
        return scene.estimates.fresh(pool, kind, scene.now) >= self.rules.samples_min

    # --- looking ahead

    def _outlook(self, scene: _Scene, presence: Presence, at: float, *, reserve: bool = False) -> Outlook:
        candidate, lengths, rules = scene.candidate, scene.lengths, self.rules
        residence_s = rules.residence_s or (self._residence.value if self._residence.samples else math.inf)
        return Outlook(
            now=scene.now,
            at=at,
            presence=presence,
            interactive=lengths.tail(Priority.INTERACTIVE),
            batch=lengths.tail(Priority.BATCH),
            context=self._size(candidate),
            growth=lengths.mean(candidate.priority),
            block_tokens=scene.view.manifest.layout.block_tokens,
            priority=candidate.priority,
            choices=candidate.choices,
            reserve=reserve,
            z=rules.z if reserve else 0.0,
            residence_s=residence_s,
            stale_s=STALE_REPORTS * scene.view.report_s,
        )

    def _ranked(self, scene: _Scene, *, reserve: bool = True) -> Ranking:
        """Decode instances, best first. By survival whatever the policy, and on arrival with a reserve: the choice
        must count what is on its way, or all go where it is emptiest now. At the hand-over without one: what comes
        much later has a choice of its own then, and would outweigh what is there."""
        outlook = self._outlook(scene, survival, scene.hand_over_at, reserve=reserve)
        return outlook.rank(scene.decodes, scene.estimates)

    def _tested(self, scene: _Scene, ranked: Ranking) -> Iterable[Forecast]:
        """The same instances in the same order, as the policy sees them."""
        rules, presence = self.rules, PRESENCES[self.rules.policy]
        if presence is survival and rules.reserve:
            return ranked
        at = scene.now if rules.policy == "early" else scene.hand_over_at
        outlook = self._outlook(scene, presence, at, reserve=rules.reserve)
        instances = [forecast.instance for forecast in ranked]
        return [outlook.of(instance, scene.estimates.step(instance.kind)) for instance in instances]

    # --- saying no

    def _refuse_late(self, scene: _Scene) -> Judgement:
        candidate, limit_s = scene.candidate, scene.candidate.limits.ttft_s
        decode = candidate.held and not self._waits_for_prefill(candidate)
        best = next(iter(self._ranked(scene)), None) if decode else None
        if best is not None:
            text = f"After {scene.waited_s:.3g} s there was no room in decode, and {limit_s:.3g} s are allowed."
            retry_s = self._retry_s(scene, best.instance)
            return _refuse(scene, best, "tbt", text, retry_s)
        text = "The answer would begin too late."
        excess_s = candidate.prefill_s - limit_s  # of a newcomer, which has waited for nothing yet
        never = (candidate.compute_s or 0.0) > limit_s
        retry_s = RETRY_GRID_S[-1] if never else self._behind(scene, max(excess_s, RETRY_GRID_S[0]))
        return _refuse(scene, None, "ttft", text, retry_s)

    def _full(self, scene: _Scene, best: Forecast, *, hold: bool) -> Judgement:
        """Decode has no room. `best` is the instance that comes nearest."""
        bound_s, share = self._bound(scene.candidate, best)
        if best.step_s > bound_s:
            text = (
                f"Decode is too slow for one more: beside the others {bound_s:.3g} s between tokens are allowed."
            )
        else:
            text = f"Decode would need {best.room_share:.0%} of its memory or batch, and {share:.0%} are allowed."
        if not hold:
            return _refuse(scene, best, "tbt", text, self._retry_s(scene, best.instance))
        limits, ttft_s = scene.candidate.limits, scene.ttft_s
        return Judgement(Verdict.HOLD, best.instance, limits, ttft_s, best.step_s, "tbt", text)

    def _retry_s(self, scene: _Scene, instance: Instance) -> float:
        """The first wait after which an equal request is expected to fit there, if nobody comes but those who are
        held already."""
        if not self._known(scene, Pool.DECODE, instance.kind):
            return self._behind(scene, RETRY_GRID_S[0])
        line = scene.estimates.step(instance.kind)
        for wait_s in RETRY_GRID_S:
            outlook = self._outlook(scene, survival, scene.hand_over_at + wait_s, reserve=True)
            if self._takes(scene, outlook.of(instance, line)):
                return self._behind(scene, wait_s)
        return RETRY_GRID_S[-1]

    def _behind(self, scene: _Scene, wait_s: float) -> float:
        """`wait_s` after those who are held: who comes back stands behind them."""
        candidate = scene.candidate
        return min(
            wait_s + self.drain_s(scene.view, candidate.waiting, candidate.waiting_tokens), RETRY_GRID_S[-1]
        )


def _admit(scene: _Scene, taker: Forecast | None) -> Judgement:
    """To this instance; None if none is alive."""
    limits = scene.candidate.limits
    if taker is None:
        return Judgement(Verdict.ADMIT, None, limits, scene.ttft_s)
    return Judgement(Verdict.ADMIT, taker.instance, limits, scene.ttft_s, taker.step_s)


def _refuse(scene: _Scene, best: Forecast | None, reason: str, text: str, retry_after_s: float) -> Judgement:
    limits, tbt_s = scene.candidate.limits, best.step_s if best else None
    return Judgement(Verdict.REFUSE, None, limits, scene.ttft_s, tbt_s, reason, text, retry_after_s)
