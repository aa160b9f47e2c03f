"""Predicted times, fitted on line to what instances report. Pure; a prediction is a few products of floats.

A forward pass reads the weights once (base), multiplies them with every token (linear), and compares every token
with those before it (attention). So, with n tokens after a prefix of p in passes of at most `chunk`, and with B
sequences of together C tokens of context:

    prefill = ceil(n / chunk) * base + token * n + pair * n * (p + n / 2)
    step    = base + row * B + token * C

A decode step that computes part of a prompt beside its batch takes a step and, for that part, a pass with three
coefficients of its own, which say what the step takes longer.

Instances of one pool and kind share one fit. No coefficient is below 0: more work never betters a prediction.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from conductor.fit import Three
from conductor.kind import CHUNK_TOKENS, PREFILL_PRIOR, STEP_PRIOR, Kind
from conductor.senders import Senders
from protocol.ids import Incarnation, SegmentId
from protocol.registry import Pool, Timing

SEEN_MAX = 1024
"""Lives of instances whose latest timing is remembered; far more than live at once."""

KINDS_MAX = 64
"""Kinds that are remembered: a cluster has a few, and a restart with other settings may add one."""

REST_SAMPLES_MIN = 8
"""So many samples are the least from which a prompt beside a batch is foretold. Each is a difference of two times,
and at the start of a machine, when all its instances try passes at once, these are noisy."""

SECONDS_MIN, SECONDS_MAX = 1e-9, 1e6
"""What a pass can take: a clock's tick to days. What lies beyond, or is no number, was not measured."""


class StepLine(NamedTuple):
    """A decode step's time as a line: seconds a step, a sequence in the batch, and a token of their context."""

    base_s: float
    row_s: float
    token_s: float

    def at(self, batch: float, context: float) -> float:
        """Seconds of a step with `batch` sequences that have `context` tokens together."""
        return self.base_s + self.row_s * batch + self.token_s * context


class PassLine(NamedTuple):
    """The time of a prompt's passes: seconds a pass, a token, and a pair of tokens; tokens of a pass at most."""

    base_s: float
    token_s: float
    pair_s: float
    chunk: int

    def at(self, tokens: int, prefix: int) -> float:
        """Seconds of all passes that compute `tokens` after a `prefix`."""
        passes = -(-tokens // self.chunk)
        return passes * self.base_s + tokens * (self.token_s + self.pair_s * (prefix + tokens / 2))


class Estimates:
    """Predicted times of all kinds of instances and all senders. Mutates: learn, learn_transfer; others cache.

    A kind without samples is taken for the mean of the others, or for the prior while there are none: were it
    taken for slow, it would get no work and so never a sample.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[Pool, str], Kind] = OrderedDict()
        self._seen: OrderedDict[Incarnation, int] = OrderedDict()
        self._passes: dict[str, PassLine] = {}
        self._steps: dict[str, StepLine] = {}
        self._rests: dict[str, PassLine | None] = {}
        self._senders = Senders()

    def learn(
        self, pool: Pool, kind: str, incarnation: Incarnation, timings: Sequence[Timing], now: float
    ) -> None:
        """Take in a report of an instance. Each timing is used once, and one that makes no sense never."""
        self._senders.now = max(self._senders.now, now)
        new = [] if pool is Pool.KVCACHE else self._new_of(incarnation, timings)
        if not new:
            return
        known = self._kinds.get((pool, kind)) or self._kinds.setdefault((pool, kind), Kind(pool))
        self._kinds.move_to_end((pool, kind))
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        known.learn(new, now)
        self._passes.clear()
        self._steps.clear()
        self._rests.clear()

    def prefill_s(self, kind: str, tokens: int, prefix: int) -> float:
        """To compute `tokens` after a `prefix` whose KV is there: all passes of it, once it has its turn."""
        return self._pass(kind).at(tokens, prefix)

    def _pass(self, kind: str) -> PassLine:
        line = self._passes.get(kind)
        if line is None:
            known = self._kinds.get((Pool.PREFILL, kind))
            chunk = CHUNK_TOKENS if known is None else known.chunk
            line = self._passes[kind] = PassLine(*self._line(Pool.PREFILL, kind, PREFILL_PRIOR), chunk)
        return line

    def rest(self, kind: str) -> PassLine | None:
        """What a prompt adds to the steps of a decode instance that computes it beside its batch.

        Before such steps were measured: what it takes in passes of its own on prefill instances of the same kind.
        That is more, since a step and a pass share the reading of the weights. None if neither is known."""
        if kind not in self._rests:
            self._rests[kind] = self._rest(kind)
        return self._rests[kind]

    def _rest(self, kind: str) -> PassLine | None:
        there, alone = self._kinds.get((Pool.DECODE, kind)), self._kinds.get((Pool.PREFILL, kind))
        if there is None or there.fit.samples == 0:
            return None
        if there.rests.samples >= REST_SAMPLES_MIN:
            return PassLine(*there.rests.coefficients(), there.rest_chunk)
        return self._pass(kind) if alone is not None else None

    def step(self, kind: str) -> StepLine:
        """The line of a decode step."""
        line = self._steps.get(kind)
        if line is None:
            line = self._steps[kind] = StepLine(*self._line(Pool.DECODE, kind, STEP_PRIOR))
        return line

    def learn_transfer(self, source: SegmentId, bytes_: int, seconds: float, now: float) -> None:
        """A segment sent `bytes_` of KV in `seconds`, to whom and over what it may be."""
        self._senders.learn(source, bytes_, seconds, now)

    def transfer_s(self, source: SegmentId, bytes_: int, in_flight: int = 0) -> float:
        """To fetch `bytes_` from a segment that has `in_flight` bytes to send before them."""
        return self._senders.transfer_s(source, bytes_, in_flight)

    def fresh(self, pool: Pool, kind: str, now: float) -> int:
        """Samples heard within FRESH_S: whether a prediction speaks of the machines as they are now."""
        known = self._kinds.get((pool, kind))
        return 0 if known is None else known.fresh(now)

    def _line(self, pool: Pool, kind: str, prior: Three) -> Three:
        known = self._kinds.get((pool, kind))
        if known is not None:
            return known.fit.coefficients()
        others = [other.fit.coefficients() for (of, _), other in self._kinds.items() if of is pool] or [prior]
        sums = [sum(column) / len(others) for column in zip(*others, strict=True)]
        return sums[0], sums[1], sums[2]

    def _new_of(self, incarnation: Incarnation, timings: Sequence[Timing]) -> list[Timing]:
        """Those not used before, in order of their steps."""
        last, new = self._seen.get(incarnation, 0), []
        for timing in timings:
            if timing.step > last:
                last = timing.step
                sound = min(timing.tokens, timing.context, timing.rest, timing.prefix) >= 0
                if sound and timing.tokens + timing.rest > 0 and SECONDS_MIN <= timing.seconds <= SECONDS_MAX:
                    new.append(timing)
        self._seen[incarnation] = last
        self._seen.move_to_end(incarnation)
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        return new
