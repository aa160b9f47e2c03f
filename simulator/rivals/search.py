"""How much load a system carries: the highest speed at which enough requests meet their limits. Pure.

One measurement tells a share for each of several limits at once, so one search serves them all.
"""

import math
from collections.abc import Callable, Mapping, Sequence

Points = Mapping[float, Sequence[float]]
"""By speed: the share of requests within their limits, for each limit."""

SPEED_MIN, SPEED_MAX = 1 / 16, 64.0
"""What is not found between these is said to be not there: no rate of interest is so far from a trace's own."""


def searched(
    measure: Callable[[float], Sequence[float]], enough: float, guess: float, stride: float, precision: float
) -> Points:
    """Measures from `guess` until each limit's speed is between two whose ratio is at most `precision`.

    While all speeds tried are too low (or high) for a limit, the next is `stride` times as high (or low); then the
    bracket is halved. Shares need not fall steadily: what is found is a speed that is enough with a next one that
    is not, and no higher one that was tried was enough. Speeds that are equal are measured once.
    """
    points = {guess: measure(guess)}
    for limit in range(len(points[guess])):
        while (speed := _next(points, limit, enough, stride, precision)) is not None:
            points[speed] = measure(speed)
    return dict(sorted(points.items()))


def bracket(points: Points, limit: int, enough: float) -> tuple[float, float]:
    """The highest speed that is enough, and the lowest above it: 0 and infinite where there is none."""
    low = max((speed for speed, shares in points.items() if shares[limit] >= enough), default=0.0)
    return low, min((speed for speed in points if speed > low), default=math.inf)


def _next(points: Points, limit: int, enough: float, stride: float, precision: float) -> float | None:
    low, high = bracket(points, limit, enough)
    if math.isinf(high):
        return low * stride if low * stride <= SPEED_MAX else None
    if not low:
        return high / stride if high / stride >= SPEED_MIN else None
    return math.sqrt(low * high) if high / low > precision else None


def capacity(points: Points, limit: int, enough: float) -> float:
    """The speed at which the share of a limit falls to `enough`, on a straight line between the two points around
    it; 0 if no speed that was tried is enough, and the highest one if all are."""
    low, high = bracket(points, limit, enough)
    if not low or math.isinf(high):
        return low
    above, below = points[low][limit] - enough, enough - points[high][limit]
    return low + (high - low) * above / (above + below)
