"""Outcomes come to the figures that one would count by hand."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.ask import Limits, Priority
from simulator.record import Outcome, Series, class_of, gap_figures, spread_of, summarize, swing

LIMITS = Limits(ttft_s=30.0, tbt_s=0.1)
SERVED = Outcome(
    at_s=10.0,
    tokens=5000,
    output=11,
    priority=Priority.INTERACTIVE,
    end_s=13.0,
    held_s=0.5,
    prefill_s=1.0,
    reused=1000,
    first_token_s=12.0,
    tpot_s=0.05,
    tbt_s=0.08,
)
REFUSED = Outcome(12.0, 20_000, 0, Priority.BATCH, 20.0, refused="tbt", held_s=8.0)
WASTED = Outcome(14.0, 70_000, 0, Priority.INTERACTIVE, 30.0, refused="tbt", prefill_s=3.0)
FAILED = Outcome(15.0, 3000, 0, Priority.INTERACTIVE, 40.0, failed="died", prefill_s=1.0)
LATE = replace(SERVED, at_s=0.0, first_token_s=30.5, end_s=32.0)
STUTTERING = replace(SERVED, tbt_s=0.11)


def test_each_outcome_is_judged_by_its_end_and_both_limits() -> None:
    assert [one.within(LIMITS) for one in (SERVED, REFUSED, WASTED, FAILED, LATE, STUTTERING)] == [
        True,
        *[False] * 5,
    ]
    assert [one.wasted for one in (SERVED, REFUSED, WASTED, FAILED)] == [False, False, True, True]
    assert (SERVED.ttft_s, REFUSED.ttft_s) == (2.0, math.inf)


def test_a_run_is_summed_up_as_by_hand() -> None:
    told = summarize([SERVED, REFUSED, WASTED, FAILED, LATE, STUTTERING], LIMITS)
    assert (told.requests, told.finished, told.refused, told.failed, told.missed, told.within) == (
        6,
        3,
        2,
        1,
        3,
        1,
    )
    assert told.refused_share == pytest.approx(1 / 3)
    assert told.refused_by_reason == {"tbt": 2}
    assert told.refused_by_length == {"<4k": 0, "4-16k": 0, "16-64k": 1, ">64k": 1}
    assert told.refused_mean_tokens == 45_000
    assert (told.span_s, told.goodput, told.served_tokens) == (40.0, 1 / 40, 5011)
    assert (told.prefill_s, told.wasted_prefill_s) == (7.0, 4.0)
    assert told.wasted_share == pytest.approx(4 / 7)
    assert told.hit_rate == pytest.approx(3000 / (3 * 5000 + 70_000 + 3000))
    assert told.longest_hold_s == {"<4k": 0.0, "4-16k": 0.5, "16-64k": 8.0, ">64k": 0.0}
    assert told.ttft_s.p50 == 2.0
    assert told.tbt_s.longest == 0.11
    assert json.loads(json.dumps(told.body(), allow_nan=False))["ttft_s"]["longest"] == 30.5


def test_a_run_of_nothing_has_figures_too() -> None:
    told = summarize([], LIMITS)
    assert (told.requests, told.goodput, told.hit_rate, told.wasted_share, told.ttft_s.mean) == (0, 0, 0, 0, 0)


def test_one_token_has_no_gap_to_judge() -> None:
    single = replace(SERVED, output=1, tpot_s=0.0, tbt_s=0.0)
    assert single.within(LIMITS)
    assert summarize([single], LIMITS).tbt_s == spread_of([])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 30)), min_size=1, max_size=20))
def test_the_longest_tenth_is_that_of_all_gaps_one_by_one(gaps: list[tuple[float, int]]) -> None:
    single = sorted((seconds for seconds, many in gaps for _ in range(many)), reverse=True)
    tenth = single[: math.ceil(len(single) / 10)]
    mean, worst = gap_figures(gaps)
    assert mean == pytest.approx(sum(single) / len(single))
    assert worst == pytest.approx(sum(tenth) / len(tenth))


def test_no_gaps_are_no_time() -> None:
    assert gap_figures([]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "<4k"), (4095, "<4k"), (4096, "4-16k"), (16_384, "16-64k"), (65_535, "16-64k"), (65_536, ">64k")],
)
def test_classes_of_length(tokens: int, name: str) -> None:
    assert class_of(tokens) == name


def test_a_swing_shows_and_a_slow_change_does_not() -> None:
    wave = [math.sin(2 * math.pi * second / 40) for second in range(1200)]
    slow = [second / 1200 for second in range(1200)]
    assert swing(wave) == pytest.approx(math.sqrt(1 / 2), rel=0.05)
    assert swing(slow) < 0.02
    assert swing([a + b for a, b in zip(wave, slow, strict=True)]) == pytest.approx(swing(wave), rel=0.02)
    assert swing(wave[::2], every_s=2.0) == pytest.approx(swing(wave), rel=0.02)
    assert swing([0.7] * 500) == pytest.approx(0.0, abs=1e-9)
    assert swing([]) == swing([3.0]) == 0.0


def test_a_series_keeps_every_moment_and_can_be_cut() -> None:
    series = Series()
    for second in range(200):
        series.sample(float(second), (float(second >= 100), 0.5), 3, 2, 1, second, 0.25, copies=[4, 2])
    assert series.refused[-1] == 199
    assert json.loads(json.dumps(series.body()))["copies"][0] == [4, 2]
    assert series.swing(until_s=100) == 0.0 < series.swing()
    assert {len(column) for name, column in series.body().items() if name != "every_s"} == {200}
