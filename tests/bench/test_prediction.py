"""The median error that a histogram of ratios holds, against that of the ratios themselves."""

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.prediction import median_error
from conductor.metrics import RATIOS


def histogram(ratios: list[float]) -> list[tuple[float, float]]:
    return [(bound, sum(ratio <= bound for ratio in ratios)) for bound in (*RATIOS, math.inf)]


def test_an_empty_histogram_has_no_error() -> None:
    assert median_error(histogram([])) == 0.0


def test_ratios_that_spread_evenly_are_found_exactly() -> None:
    ratios = [0.9 + 0.2 * (n + 0.5) / 1000 for n in range(1000)]
    assert median_error(histogram(ratios)) == pytest.approx(5.0, abs=0.1)


def test_predictions_that_are_all_too_short_are_as_wrong_as_they_are() -> None:
    assert 25.0 <= median_error(histogram([1.4] * 10)) <= 50.0


@given(st.lists(st.floats(0.8, 1.25), min_size=40, max_size=200))
def test_the_error_is_as_exact_as_the_buckets(ratios: list[float]) -> None:
    real = 100 * median(abs(ratio - 1) for ratio in ratios)
    assert median_error(histogram(ratios)) == pytest.approx(real, abs=15.0)
