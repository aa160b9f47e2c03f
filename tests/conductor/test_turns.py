"""How long a newcomer would stand in the line: as long as it took those before him."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.turns import TURNS, TURNS_MIN, Turns


def test_a_line_that_moves_twice_a_second_is_waited_in_for_half_a_second_each():
    turns = Turns()
    for number in range(20):
        turns.took(number / 2)
    assert turns.wait_s(10, 10.0) == pytest.approx(5.0)


def test_nothing_is_said_after_few_admissions_or_when_the_line_was_empty():
    turns = Turns()
    for number in range(TURNS_MIN - 1):
        turns.took(float(number))
    assert turns.wait_s(10, 100.0) == 0.0
    turns.took(8.0)
    assert turns.wait_s(10, 100.0) > 0.0
    turns.empty()
    assert turns.wait_s(10, 100.0) == 0.0


@given(
    st.lists(st.floats(0.0, 100.0), min_size=TURNS_MIN, max_size=3 * TURNS),
    st.integers(0, 1000),
    st.integers(0, 9),
)
def test_more_ahead_and_a_line_that_has_stood_longer_never_shorten_the_wait(
    gaps: list[float], ahead: int, more: int
):
    turns, now = Turns(), 0.0
    for gap in gaps:
        now += gap
        turns.took(now)
    assert (
        0.0 <= turns.wait_s(ahead, now) <= turns.wait_s(ahead + more, now) <= turns.wait_s(ahead + more, now + 1.0)
    )
