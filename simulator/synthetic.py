"""Made traffic: requests that arrive at random, steadily or in bursts, and change in mid-run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from random import Random

from simulator.workload import BLOCK_TOKENS, Arrival


@dataclass(frozen=True)
class LogNormal:
    """A length in tokens: log-normal with this mean, cut to [shortest, longest]."""

    mean: float
    sigma: float = 1.0
    """Of the length's logarithm. 1 is close to the public conversation trace: many short ones, a heavy tail."""
    shortest: int = 1
    longest: int = 131_072
    """As long as the context window of LLaMA3-70B."""

    def draw(self, rng: Random) -> int:
        """One length. The mean of a log-normal is exp(mu + sigma^2 / 2); cutting it moves the mean a little."""
        mu = log(self.mean) - self.sigma**2 / 2
        return round(min(self.longest, max(self.shortest, rng.lognormvariate(mu, self.sigma))))


@dataclass(frozen=True)
class Phase:
    """Traffic of one kind for some time. Several phases, one after another, are a shift of traffic."""

    span_s: float
    rate: float
    """Mean arrivals a second over the whole phase."""
    input: LogNormal = LogNormal(12_000)
    """Of prompts; the default's mean is that of the public conversation trace."""
    output: LogNormal = LogNormal(343)
    """Of answers; likewise."""
    cv: float = 1.0
    """Of the gamma distributed time between arrivals, deviation over mean. 1 is Poisson, more is bursty."""
    on_s: float = 0.0
    """With `off_s`: arrivals come only in periods of this mean length, exponential. `rate` holds all the same."""
    off_s: float = 0.0
    """Mean length of the silence between; 0 for none."""
    prefixes: int = 0
    """So many different beginnings, the k-th chosen with a weight of 1/k (Zipf); 0: prompts share nothing."""
    prefix_tokens: int = 0
    """Length of such a beginning, in whole blocks; shorter prompts have less of it."""

    def __post_init__(self) -> None:
        if min(self.span_s, self.rate, self.cv) <= 0:
            raise ValueError("span_s, rate and cv must be above 0")
        if (self.on_s > 0) != (self.off_s > 0) or min(self.on_s, self.off_s) < 0:
            raise ValueError("on_s and off_s go together, and are not negative")
        if self.prefixes < 0 or self.prefix_tokens < 0 or self.prefix_tokens % BLOCK_TOKENS:
            raise ValueError(
                f"prefixes and prefix_tokens are not negative, the latter a multiple of {BLOCK_TOKENS}"
            )


def synthesize(phases: Sequence[Phase], rng: Random) -> list[Arrival]:
    """The arrivals of all phases, one after another. The k-th shared beginning is the same one in all phases.

    All randomness is drawn from `rng`, in one order: equal seeds give equal arrivals.
    """
    heads: dict[int, list[int]] = {}
    arrivals: list[Arrival] = []
    fresh, start_s = 0, 0.0
    for phase in phases:
        weights = [1 / (k + 1) for k in range(phase.prefixes)]
        for at_s in _times(phase, rng):
            tokens, output = phase.input.draw(rng), phase.output.draw(rng)
            head: list[int] = []
            if weights:
                key = rng.choices(range(phase.prefixes), weights)[0]
                head = heads.setdefault(key, [])
                missing = phase.prefix_tokens // BLOCK_TOKENS - len(head)
                head.extend(range(fresh, fresh + missing))
                fresh += max(0, missing)
            # Only whole blocks are shared: an id stands for the same number of tokens wherever it is.
            head = head[: min(tokens, phase.prefix_tokens) // BLOCK_TOKENS]
            own = -(-tokens // BLOCK_TOKENS) - len(head)
            arrivals.append(Arrival(start_s + at_s, tokens, output, [*head, *range(fresh, fresh + own)]))
            fresh += own
        start_s += phase.span_s
    return arrivals


def _times(phase: Phase, rng: Random) -> Iterator[float]:
    """Moments of arrival in [0, span_s). The clock between arrivals runs only in periods that are on."""
    shape = 1 / phase.cv**2
    share_on = phase.on_s / (phase.on_s + phase.off_s) if phase.off_s else 1.0
    scale = share_on / (phase.rate * shape)
    now, on_left = 0.0, rng.expovariate(1 / phase.on_s) if phase.off_s else float("inf")
    while True:
        wait = rng.gammavariate(shape, scale)
        while wait >= on_left:
            wait -= on_left
            now += on_left + rng.expovariate(1 / phase.off_s)
            on_left = rng.expovariate(1 / phase.on_s)
        now, on_left = now + wait, on_left - wait
        if now >= phase.span_s:
            return
        yield now
