"""Moving means of step time and rate, and the timings of single passes."""

import pytest

from engine.pace import Pace
from protocol.registry import TIMINGS_MAX, Timing


def test_before_the_first_step_all_is_zero() -> None:
    pace = Pace()
    assert (pace.steps, pace.step_s, pace.tokens_s) == (0, 0.0, 0.0)


def test_the_first_step_counts_whole() -> None:
    pace = Pace()
    pace.count(512, 0, 2.0)
    assert (pace.steps, pace.step_s, pace.tokens_s) == (1, 2.0, 256.0)


def test_a_change_of_pace_is_known_after_a_few_steps_and_one_odd_step_is_not_believed() -> None:
    pace = Pace()
    for _ in range(10):
        pace.count(100, 0, 1.0)
    pace.count(100, 0, 2.0)
    assert pace.step_s == pytest.approx(1.2)
    assert pace.tokens_s == pytest.approx(90.0)
    for _ in range(15):
        pace.count(100, 0, 2.0)
    assert pace.step_s == pytest.approx(2.0, rel=0.05)
    assert pace.tokens_s == pytest.approx(50.0, rel=0.05)


def test_a_clock_that_stood_still_breaks_nothing() -> None:
    pace = Pace()
    pace.count(1, 0, 0.0)
    assert pace.step_s == 0.0
    assert pace.tokens_s > 0.0


def test_the_first_pass_is_cold_and_is_not_told() -> None:
    pace = Pace()
    pace.count(8, 100, 9.0)
    pace.count(8, 108, 0.5)
    assert pace.timings() == [Timing(2, 8, 108, 0.5)]


def test_a_timing_is_told_once() -> None:
    pace = Pace()
    for _ in range(3):
        pace.count(1, 0, 0.1)
    assert [timing.step for timing in pace.timings()] == [2, 3]
    assert pace.timings() == []
    pace.count(1, 0, 0.1)
    assert [timing.step for timing in pace.timings()] == [4]


def test_of_many_passes_the_latest_are_told() -> None:
    pace = Pace()
    for _ in range(TIMINGS_MAX + 10):
        pace.count(1, 0, 0.1)
    assert [timing.step for timing in pace.timings()] == list(range(11, TIMINGS_MAX + 11))


def test_several_passes_make_one_timing_of_their_mean() -> None:
    pace = Pace()
    pace.count(4, 40, 1.0)
    pace.count(4, 46, 0.8, steps=4)
    assert pace.steps == 5
    assert pace.timings() == [Timing(5, 4, 46, 0.2)]


def test_several_passes_weigh_as_much_as_one_by_one() -> None:
    together, one_by_one = Pace(), Pace()
    for pace in (together, one_by_one):
        pace.count(4, 0, 1.0)
    together.count(4, 0, 1.5, steps=3)
    for _ in range(3):
        one_by_one.count(4, 0, 0.5)
    assert together.step_s == pytest.approx(one_by_one.step_s)
    assert together.tokens_s == pytest.approx(one_by_one.tokens_s)


def test_a_pass_that_did_other_work_besides_counts_and_is_not_told() -> None:
    pace = Pace()
    pace.count(4, 40, 1.0)
    pace.count(4, 40, 5.0, clean=False)
    assert (pace.steps, pace.timings()) == (2, [])


def test_what_a_step_computed_of_a_prompt_is_told_with_it() -> None:
    pace = Pace()
    pace.count(4, 40, 1.0)
    pace.count(4, 40, 1.5, rest=16, prefix=32)
    assert pace.timings() == [Timing(2, 4, 40, 1.5, rest=16, prefix=32)]
