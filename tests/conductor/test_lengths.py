"""The distribution of lengths: exact where it can be, faithful to what ended, and never certain of an end."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.ask import Priority
from conductor.lengths import HALF_LIFE, LENGTH_MAX, SAMPLES_MIN, SLOTS, STARTS, Lengths, slot_of

CHAT, BATCH = Priority.INTERACTIVE, Priority.BATCH

answers = st.lists(
    st.tuples(st.sampled_from(Priority), st.integers(0, 2 * LENGTH_MAX), st.booleans()), max_size=400
)
positions = st.floats(0, 3 * LENGTH_MAX)


def learnt(observed: list[tuple[Priority, int, bool]]) -> Lengths:
    lengths = Lengths()
    for priority, tokens, ended in observed:
        if ended:
            lengths.observe(priority, tokens)
        else:
            lengths.censored(priority, tokens)
    return lengths


def of(tokens: list[int], priority: Priority = CHAT) -> Lengths:
    return learnt([(priority, each, True) for each in tokens])


def test_slots_are_exact_to_64_tokens_and_3_percent_wide_beyond():
    assert STARTS[:65] == tuple(range(65))
    assert STARTS[-1] == LENGTH_MAX
    assert all((after - start) / start <= 1 / 32 for start, after in pairwise(STARTS[64:]))


@given(st.integers(0, LENGTH_MAX - 1))
def test_each_length_has_its_slot(tokens: int):
    slot = slot_of(tokens)
    assert 0 <= slot < SLOTS
    assert STARTS[slot] <= tokens < STARTS[slot + 1]


def test_before_there_are_samples_the_prior_holds():
    assert Lengths().mean(CHAT) == pytest.approx(300, rel=0.01)
    assert Lengths().tail(CHAT).survives(0, 182) == pytest.approx(0.5, rel=0.01)
    assert of([7] * int(SAMPLES_MIN / 2)).mean(CHAT) == Lengths().mean(CHAT)


def test_short_lengths_are_exact():
    lengths = of([10, 20, 30, 40] * 300)
    for said, more, share in ((0, 9, 1), (0, 10, 3 / 4), (0, 25, 2 / 4), (10, 10, 2 / 3), (20, 10, 1 / 2)):
        assert lengths.tail(CHAT).survives(said, more) == pytest.approx(share, rel=0.01)
    assert lengths.mean(CHAT) == pytest.approx(25, rel=0.01)
    assert lengths.tail(CHAT).mean_left(20) == pytest.approx(15, rel=0.01)


def test_between_two_lengths_of_a_wide_slot_the_tail_is_a_straight_line():
    lengths = of(list(range(100, 1100)))
    for x in (150, 333.3, 700.7, 1001):
        assert lengths.tail(CHAT).survives(0, x) == pytest.approx((1100 - x) / 1000, abs=0.16)
    assert lengths.tail(CHAT).survives(500, 0.5) > lengths.tail(CHAT).survives(500, 1.0)


def test_a_heavy_tail_makes_old_answers_likely_to_go_on():
    draw = random.Random(1)
    lengths = of([min(int(draw.paretovariate(1.1)) * 20, 10**6) for _ in range(2000)])
    survival = [lengths.tail(CHAT).survives(said, 100) for said in (20, 100, 500, 2000)]
    assert survival == sorted(survival)


def test_beyond_all_that_was_seen_the_last_hazard_goes_on():
    lengths = of(list(range(1, 501)) * 2)
    once = lengths.tail(CHAT).survives(5000, 10)
    assert 0 < once < 1
    assert lengths.tail(CHAT).survives(10**6, 20) == pytest.approx(once**2)
    assert lengths.tail(CHAT).mean_left(5000) == lengths.tail(CHAT).mean_left(10**6)


def test_lengths_that_are_all_equal_still_end_where_they_do():
    lengths = of([100] * 500)
    assert lengths.tail(CHAT).survives(0, 95) == pytest.approx(1)
    assert lengths.tail(CHAT).survives(0, 120) < 0.01
    assert lengths.mean(CHAT) == pytest.approx(100, rel=0.02)


def test_half_of_what_is_believed_is_younger_than_the_half_life():
    lengths = of([10] * 10_000 + [50] * int(HALF_LIFE))
    assert lengths.tail(CHAT).survives(0, 20) == pytest.approx(0.5, abs=0.01)


def test_weights_stay_in_range_however_many_answers_come():
    lengths = of([10] * 30_000 + [50] * 15_000)
    assert lengths.tail(CHAT).survives(0, 20) == pytest.approx(1, abs=0.01)
    assert lengths.mean(CHAT) == pytest.approx(50, rel=0.02)


def test_a_class_is_judged_by_its_own_answers_once_it_has_enough():
    lengths = of([10] * 1000, CHAT)
    assert lengths.mean(BATCH) == pytest.approx(10, rel=0.1)
    for _ in range(int(SAMPLES_MIN) + 10):
        lengths.observe(BATCH, 60)
    assert lengths.mean(BATCH) == pytest.approx(60, rel=0.1)
    assert lengths.mean(CHAT) == pytest.approx(10, rel=0.1)


def test_a_cancelled_answer_would_have_become_longer():
    """Half of the clients leave after 5 tokens; those who stay see 10 or 40. Nobody's answer was 5 tokens."""
    lengths = learnt([(CHAT, tokens, ended) for tokens, ended in ((5, False), (10, True)) * 500])
    assert lengths.tail(CHAT).survives(0, 9) == pytest.approx(1)
    lengths = learnt([(CHAT, t, e) for t, e in ((5, False), (10, True), (5, False), (40, True)) * 300])
    assert lengths.tail(CHAT).survives(0, 20) == pytest.approx(0.5, abs=0.01)


def test_if_only_cancelled_answers_are_known_one_is_still_not_for_ever():
    assert 0 < learnt([(CHAT, 50, False)] * 200).tail(CHAT).survives(0, 1000) < 1


@given(answers, st.sampled_from(Priority), positions, positions, positions)
def test_survival_is_a_probability_that_falls_with_what_is_asked(observed, priority, said, more, further):
    lengths = learnt(observed)
    less = lengths.tail(priority).survives(said, more + further)
    assert 0 <= less <= lengths.tail(priority).survives(said, more) + 1e-12 <= 1 + 1e-12
    assert lengths.tail(priority).survives(said, 0) == pytest.approx(1)
    assert 0.5 <= lengths.tail(priority).mean_left(said) < math.inf


@given(answers, st.floats(0, 5000), st.floats(0, 5000), st.floats(0, 5000))
def test_to_go_on_twice_is_to_go_on_for_both(observed, said, first, second):
    lengths = learnt(observed)
    both = lengths.tail(CHAT).survives(said, first) * lengths.tail(CHAT).survives(said + first, second)
    assert lengths.tail(CHAT).survives(said, first + second) == pytest.approx(both, rel=1e-6, abs=1e-9)


@given(answers)
def test_equal_answers_make_equal_predictions(observed):
    one, other = learnt(observed), learnt(observed)
    assert [one.tail(CHAT).survives(s, 50) for s in range(0, 500, 50)] == [
        other.tail(CHAT).survives(s, 50) for s in range(0, 500, 50)
    ]
