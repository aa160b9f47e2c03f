"""How far off the Conductor's predictions are, read off the histograms of ratios that its metrics export."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

TTFT, STEP = "dango:ttft_prediction_ratio", "dango:tbt_prediction_ratio"
"""Histograms of real over predicted: time to first token from the admission on, and the first decode step."""

ERROR_MAX: Mapping[str, float] = {TTFT: 15.0, STEP: 10.0}
"""Per cent, of the median: what decisions on limits can bear."""

HALVINGS = 40
"""Of the range in which an error is sought: as exact as a float is."""


def median_error(buckets: Sequence[tuple[float, float]]) -> float:
    """The median of |ratio - 1|, in per cent, of a histogram's (upper bound, count up to it), with the last bound
    infinite. Ratios are taken to lie evenly within a bucket. 0 for an empty histogram."""
    total = buckets[-1][1]
    if not total:
        return 0.0
    low, high = 0.0, max(bound for bound, _ in buckets if bound < math.inf)
    for _ in range(HALVINGS):
        error = (low + high) / 2
        inside = (_up_to(buckets, 1 + error) - _up_to(buckets, 1 - error)) / total
        low, high = (low, error) if inside >= 0.5 else (error, high)
    return 100 * high


def _up_to(buckets: Sequence[tuple[float, float]], ratio: float) -> float:
    """How many ratios are at most this."""
    for (floor, below), (bound, count) in pairwise([(0.0, 0.0), *buckets]):
        if ratio < bound:
            share = 0.0 if bound == math.inf else max(ratio - floor, 0.0) / (bound - floor)
            return below + share * (count - below)
    return buckets[-1][1]
