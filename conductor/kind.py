"""What is known of one kind of instance: its fitted times, its chunk, and how fresh that is. Pure."""

from collections import deque
from collections.abc import Sequence

from conductor.fit import Fit, Three
from protocol.registry import Pool, Timing

PREFILL_PRIOR: Three = (2e-2, 2e-3, 5e-7)
"""Seconds a pass, a token, and a pair of tokens, assumed before the first sample: a model of about 10**8
parameters on two CPU cores. Samples correct the size at once; the ratios last until samples determine each of the
three. By them attention costs as much as the multiplications with weights at some thousand tokens, as usual."""

STEP_PRIOR: Three = (3e-2, 3e-3, 5e-6)
"""Seconds a step, a sequence, and a token of context: the same model on the same machine."""

CHUNK_TOKENS = 512
"""Tokens of a pass at most, assumed until a prompt was seen that took several."""

FRESH_S = 30.0
"""A sample younger than this speaks of the machine as it is now: shorter than most changes of load, long enough to
hold the samples of an instance that is used now and then."""

HEARD_EVERY_S = 1.0
"""Samples heard within this time are counted together, so that the count of fresh ones stays small."""


REST_SHARE_MIN = 0.05
"""A prompt's part in a step is taken to cost at least this share of it, however slow the batch was foretold."""


class Kind:
    """Instances of one pool that take equal times. Mutates: learn, fresh (forgets)."""

    def __init__(self, pool: Pool) -> None:
        self.fit = Fit(PREFILL_PRIOR if pool is Pool.PREFILL else STEP_PRIOR)
        self.rests = Fit(PREFILL_PRIOR)
        """What a decode step takes longer for a part of a prompt that it computes beside its batch."""
        self._prefill = pool is Pool.PREFILL
        self._largest = 0
        self._split = False
        self._heard: deque[tuple[float, int]] = deque()
        """When, and how many; at most one entry every HEARD_EVERY_S."""
        self._heard_total = 0

    @property
    def chunk(self) -> int:
        """Tokens of a prefill pass at most: the largest seen, once a pass that began where the one before it had
        ended has shown that passes are cut there."""
        return self._largest if self._split else max(self._largest, CHUNK_TOKENS)

    @property
    def rest_chunk(self) -> int:
        """The largest part of a prompt that was seen in a decode step."""
        return self._largest

    def learn(self, timings: Sequence[Timing], now: float) -> None:
        """Take in sound, new timings of one instance, in their order."""
        before: Timing | None = None
        for timing in timings:
            tokens, context = timing.tokens, timing.context
            if self._prefill:
                self._largest = max(self._largest, tokens)
                self._split = self._split or (before is not None and _goes_on(before, timing))
                self.fit.learn((1.0, tokens, tokens * (context + tokens / 2)), timing.seconds)
            elif timing.rest:
                self._learn_rest(timing)
            else:
                self.fit.learn((1.0, tokens, context), timing.seconds)
            before = timing
        self._count(len(timings), now)

    def _learn_rest(self, timing: Timing) -> None:
        base_s, row_s, token_s = self.fit.coefficients()
        alone_s = base_s + row_s * timing.tokens + token_s * timing.context
        more_s = max(timing.seconds - alone_s, REST_SHARE_MIN * timing.seconds)
        rest, prefix = timing.rest, timing.prefix
        self._largest = max(self._largest, rest)
        self.rests.learn((1.0, rest, rest * (prefix + rest / 2)), more_s)

    def fresh(self, now: float) -> int:
        """Samples heard within FRESH_S."""
        while self._heard and now - self._heard[0][0] > FRESH_S:
            self._heard_total -= self._heard.popleft()[1]
        return self._heard_total

    def _count(self, samples: int, now: float) -> None:
        if self._heard and now - self._heard[-1][0] < HEARD_EVERY_S:
            at, earlier = self._heard.pop()
            self._heard.append((at, earlier + samples))
        else:
            self._heard.append((now, samples))
        self._heard_total += samples
        self.fresh(now)


def _goes_on(before: Timing, after: Timing) -> bool:
    """Whether two passes are neighbours and the second begins where the first ended."""
    return after.step == before.step + 1 and after.context == before.context + before.tokens
