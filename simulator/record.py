"""What became of each request, and what that comes to. Times in seconds from the start of the run.

TBT of a request is the mean of its longest tenth of token gaps, as the FAST 2025 paper of Mooncake judges it; TPOT
is the mean of its gaps. The gap before the second token counts without what a hand-over takes at the least,
moving the prompt's KV and the end of the step under way: so the wait for room in decode counts. As a whole it is
`hand_over_s`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from conductor.ask import Limits, Priority

CLASSES = (("<4k", 4_096), ("4-16k", 16_384), ("16-64k", 65_536), (">64k", math.inf))
"""Prompts by length: name, and the length in tokens that they are below."""

T = TypeVar("T")

MEAN_S = 120.0
"""Of the moving mean that `swing` takes away: longer than a swing, shorter than a change of traffic."""


def class_of(tokens: int) -> str:
    """The name in CLASSES of a prompt of so many tokens."""
    return next(name for name, below in CLASSES if tokens < below)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Exactly one of finished, refused and failed."""

    at_s: float
    """Of its arrival."""
    tokens: int
    """Of the prompt."""
    output: int
    """Of the answer, as far as it was given."""
    priority: Priority
    end_s: float
    """Of its last token, its refusal or its failure."""
    refused: str = ""
    """The reason of a refusal; empty if it was accepted."""
    failed: str = ""
    """Why an accepted request could not be finished; empty if it was."""
    held_s: float = 0.0
    """Waited before its prefill."""
    prefill_s: float = 0.0
    """Computing time spent on its prompt."""
    reused: int = 0
    """Tokens of the prompt that were loaded instead of computed."""
    first_token_s: float | None = None
    """When; None: there was none."""
    tpot_s: float = 0.0
    """Mean gap between tokens; 0 where there is no gap."""
    tbt_s: float = 0.0
    """Mean of the longest tenth of the gaps."""
    hand_over_s: float = 0.0
    """The gap before the second token; 0 where there is none."""

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; infinite without one."""
        return math.inf if self.first_token_s is None else self.first_token_s - self.at_s

    @property
    def finished(self) -> bool:
        return not self.refused and not self.failed

    @property
    def wasted(self) -> bool:
        """Its prompt was computed, at least in part, and it was not served to the end."""
        return not self.finished and self.prefill_s > 0

    def within(self, limits: Limits) -> bool:
        """It was served to its end, and both limits held."""
        return self.finished and self.ttft_s <= limits.ttft_s and self.tbt_s <= limits.tbt_s


def gap_figures(gaps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Mean gap, and mean of the longest tenth (rounded up to whole gaps), of (seconds, how many such gaps)."""
    count = sum(many for _, many in gaps)
    if not count:
        return 0.0, 0.0
    tenth = left = -(-count // 10)
    longest_s = 0.0
    for seconds, many in sorted(gaps, reverse=True):
        taken = min(many, left)
        longest_s, left = longest_s + seconds * taken, left - taken
        if not left:
            break
    return sum(seconds * many for seconds, many in gaps) / count, longest_s / tenth


@dataclass(frozen=True)
class Spread:
    """A distribution in a few figures, all 0 where there is nothing."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float


def spread_of(values: Sequence[float]) -> Spread:
    """Of finite values."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (float(value) for value in numpy.percentile(values, (50, 90, 99)))
    return Spread(float(numpy.mean(values)), p50, p90, p99, float(max(values)))


@dataclass(frozen=True)
class Summary:
    """A run in figures. Times in seconds, lengths in tokens, rates a second, shares from 0 to 1."""

    requests: int
    finished: int
    refused: int
    failed: int
    refused_share: float
    refused_by_reason: dict[str, int]
    refused_by_length: dict[str, int]
    refused_mean_tokens: float
    """Mean prompt of the refused: a rule that asks "does it fit" refuses long ones."""
    missed: int
    """Accepted, and failed or over a limit."""
    within: int
    """Finished within both limits."""
    span_s: float
    """From the first arrival to the last end."""
    goodput: float
    """Requests within both limits a second of the span."""
    served_tokens: int
    """Prompts and answers of the requests within both limits."""
    prefill_s: float
    """Computing time of all prefills."""
    wasted_prefill_s: float
    """Of those whose request was then refused or failed."""
    wasted_share: float
    hit_rate: float
    """Tokens loaded instead of computed, of all tokens of the prompts that were prefilled."""
    longest_hold_s: dict[str, float]
    """By length of the prompt, refused ones too."""
    ttft_s: Spread
    """Of all that gave a token."""
    tbt_s: Spread
    """Of all that gave at least two."""
    tpot_s: Spread
    """Likewise."""
    hand_over_s: Spread
    """Likewise."""

    def body(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def summarize(outcomes: Sequence[Outcome], limits: Limits) -> Summary:
    """The figures of one run, held against these limits."""
    refused = [one for one in outcomes if one.refused]
    accepted = [one for one in outcomes if not one.refused]
    within = [one for one in outcomes if one.within(limits)]
    prefilled = [one for one in outcomes if one.prefill_s > 0 or one.first_token_s is not None]
    answered = [one for one in outcomes if one.first_token_s is not None]
    gapped = [one for one in answered if one.output > 1]
    span_s = max((one.end_s for one in outcomes), default=0.0) - min((one.at_s for one in outcomes), default=0.0)
    prefill_s = math.fsum(one.prefill_s for one in outcomes)
    wasted_s = math.fsum(one.prefill_s for one in outcomes if one.wasted)
    return Summary(
        requests=len(outcomes),
        finished=sum(one.finished for one in outcomes),
        refused=len(refused),
        failed=sum(bool(one.failed) for one in outcomes),
        refused_share=_share(len(refused), len(outcomes)),
        refused_by_reason=_counts(one.refused for one in refused),
        refused_by_length=_by_length(refused, len),
        refused_mean_tokens=_share(sum(one.tokens for one in refused), len(refused)),
        missed=len(accepted) - len(within),
        within=len(within),
        span_s=span_s,
        goodput=_share(len(within), span_s),
        served_tokens=sum(one.tokens + one.output for one in within),
        prefill_s=prefill_s,
        wasted_prefill_s=wasted_s,
        wasted_share=_share(wasted_s, prefill_s),
        hit_rate=_share(sum(one.reused for one in prefilled), sum(one.tokens for one in prefilled)),
        longest_hold_s=_by_length(outcomes, _longest_hold),
        ttft_s=spread_of([one.ttft_s for one in answered]),
        tbt_s=spread_of([one.tbt_s for one in gapped]),
        tpot_s=spread_of([one.tpot_s for one in gapped]),
        hand_over_s=spread_of([one.hand_over_s for one in gapped]),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _counts(names: Iterable[str]) -> dict[str, int]:
    listed = sorted(names)
    return {name: listed.count(name) for name in dict.fromkeys(listed)}


def _longest_hold(outcomes: Sequence[Outcome]) -> float:
    return max((one.held_s for one in outcomes), default=0.0)


def _by_length(outcomes: Sequence[Outcome], figure: Callable[[list[Outcome]], T]) -> dict[str, T]:
    return {name: figure([one for one in outcomes if class_of(one.tokens) == name]) for name, _ in CLASSES}


@dataclass
class Series:
    """The state of a run over time: one value a sample in every list, samples equally far apart."""

    every_s: float = 1.0
    at_s: list[float] = field(default_factory=list)
    prefill_load: list[float] = field(default_factory=list)
    """Worst predicted TTFT over its limit."""
    decode_load: list[float] = field(default_factory=list)
    """Mean predicted TBT over its limit."""
    running: list[int] = field(default_factory=list)
    """Rows that decode."""
    waiting: list[int] = field(default_factory=list)
    """Prompts in prefill, computed or queued."""
    held: list[int] = field(default_factory=list)
    """Requests held before their prefill."""
    refused: list[int] = field(default_factory=list)
    """So far."""
    wasted_s: list[float] = field(default_factory=list)
    """Prefill time wasted so far."""
    copies: list[list[int]] = field(default_factory=list)
    """Of each of the hottest blocks, hottest first: on how many segments it is."""

    def sample(
        self,
        at_s: float,
        loads: tuple[float, float],
        running: int,
        waiting: int,
        held: int,
        refused: int,
        wasted_s: float,
        copies: Sequence[int] = (),
    ) -> None:
        """Append one moment; `loads` are those of the prefill and the decode pool."""
        self.at_s.append(at_s)
        self.prefill_load.append(loads[0])
        self.decode_load.append(loads[1])
        self.running.append(running)
        self.waiting.append(waiting)
        self.held.append(held)
        self.refused.append(refused)
        self.wasted_s.append(wasted_s)
        self.copies.append(list(copies))

    def swing(self, since_s: float = 0.0, until_s: float = math.inf) -> float:
        """`swing` of the prefill pool's load from one moment to another."""
        chosen = [
            load for at_s, load in zip(self.at_s, self.prefill_load, strict=True) if since_s <= at_s < until_s
        ]
        return swing(chosen, self.every_s)

    def body(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def swing(load: Sequence[float], every_s: float = 1.0) -> float:
    """How much a load swings: its standard deviation after taking away its moving mean over MEAN_S.

    The mean is centred, over what there is of its window at both ends: a slow change of traffic is no swing.
    """
    if not load:
        return 0.0
    values: NDArray[numpy.float64] = numpy.asarray(load, dtype=numpy.float64)
    half = min(len(values) - 1, round(MEAN_S / every_s / 2))
    sums = numpy.concatenate(([0.0], numpy.cumsum(values)))
    index = numpy.arange(len(values))
    low, high = numpy.maximum(0, index - half), numpy.minimum(len(values), index + half + 1)
    return float(numpy.std(values - (sums[high] - sums[low]) / (high - low)))
