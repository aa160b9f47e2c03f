"""Moving means of step time and rate."""

import pytest

from engine.pace import Pace


def test_before_the_first_step_all_is_zero() -> None:
    pace = Pace()
    assert (pace.steps, pace.step_s, pace.tokens_s) == (0, 0.0, 0.0)


def test_the_first_step_counts_whole() -> None:
    pace = Pace()
    pace.count(512, 2.0)
    assert (pace.steps, pace.step_s, pace.tokens_s) == (1, 2.0, 256.0)


def test_a_change_of_pace_is_known_after_a_few_steps_and_one_odd_step_is_not_believed() -> None:
    pace = Pace()
    for _ in range(10):
        pace.count(100, 1.0)
    pace.count(100, 2.0)
    assert pace.step_s == pytest.approx(1.2)
    assert pace.tokens_s == pytest.approx(90.0)
    for _ in range(15):
        pace.count(100, 2.0)
    assert pace.step_s == pytest.approx(2.0, rel=0.05)
    assert pace.tokens_s == pytest.approx(50.0, rel=0.05)


def test_a_clock_that_stood_still_breaks_nothing() -> None:
    pace = Pace()
    pace.count(1, 0.0)
    assert pace.step_s == 0.0
    assert pace.tokens_s > 0.0
