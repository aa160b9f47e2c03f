"""A line through samples: exact where they determine it, near its prior where not, and never below 0."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conductor.fit import Fit, Three

PRIOR: Three = (3e-2, 3e-3, 5e-6)
FASTER: Three = (2e-2, 1e-4, 2e-7)
"""A machine whose batch costs little, as a GPU's does: the prior is wrong in its ratios too."""

POINTS: list[Three] = [(1.0, 1.0, 100.0), (1.0, 8.0, 2000.0), (1.0, 64.0, 60_000.0)]


def at(line: Three, x: Three) -> float:
    return sum(a * b for a, b in zip(line, x, strict=True))


def wide(dice: random.Random) -> Three:
    """Any batch, any context."""
    batch = dice.randint(1, 64)
    return 1.0, batch, batch * dice.randint(50, 2000)


def alone(dice: random.Random) -> Three:
    """One request after the other."""
    return 1.0, 1.0, dice.randint(100, 400)


def teach(fit: Fit, true: Three, x: Three, dice: random.Random, noise: float = 0.1) -> None:
    fit.learn(x, at(true, x) * max(dice.gauss(1.0, noise), 0.1))


def worst(fit: Fit, true: Three) -> float:
    """The largest relative error at POINTS."""
    return max(abs(at(fit.coefficients(), x) / at(true, x) - 1.0) for x in POINTS)


def test_without_a_sample_the_prior_stands() -> None:
    assert Fit(PRIOR).coefficients() == PRIOR


@pytest.mark.parametrize("speed", [1e-3, 1.0, 1e3])
def test_one_sample_tells_how_fast_the_machine_is(speed: float) -> None:
    fit = Fit(PRIOR)
    fit.learn(POINTS[1], speed * at(PRIOR, POINTS[1]))
    assert fit.coefficients() == pytest.approx([speed * a for a in PRIOR])


def test_a_few_samples_well_apart_tell_how_the_terms_stand_to_each_other() -> None:
    fit, dice = Fit(PRIOR), random.Random(0)
    for batch in (1, 4, 8):
        for context in (32, 256):
            teach(fit, FASTER, (1.0, batch, batch * context), dice, noise=0.03)
    for x in POINTS[:2]:
        assert at(fit.coefficients(), x) == pytest.approx(at(FASTER, x), rel=0.1)


@pytest.mark.parametrize("true", [PRIOR, FASTER])
def test_many_noisy_samples_give_the_line(true: Three) -> None:
    fit, dice = Fit(PRIOR), random.Random(1)
    for _ in range(1000):
        teach(fit, true, wide(dice), dice)
    assert worst(fit, true) < 0.03


def test_a_process_that_is_paused_now_and_then_moves_the_line_little() -> None:
    fit, dice = Fit(PRIOR), random.Random(2)
    for _ in range(1000):
        x = wide(dice)
        pause = 50.0 if dice.random() < 0.05 else 1.0
        fit.learn(x, pause * at(PRIOR, x) * dice.gauss(1.0, 0.05))
    assert worst(fit, PRIOR) < 0.1


def test_a_pause_in_the_very_first_sample_is_soon_forgotten() -> None:
    fit, dice = Fit(PRIOR), random.Random(3)
    fit.learn(POINTS[1], 20 * at(PRIOR, POINTS[1]))
    for _ in range(15):
        teach(fit, PRIOR, wide(dice), dice, noise=0.05)
    assert worst(fit, PRIOR) < 0.15


def test_a_machine_that_has_become_slower_is_believed() -> None:
    fit, dice = Fit(PRIOR), random.Random(4)
    for _ in range(1000):
        teach(fit, PRIOR, wide(dice), dice)
    slower: Three = (3 * PRIOR[0], 3 * PRIOR[1], 3 * PRIOR[2])
    for _ in range(200):
        teach(fit, slower, wide(dice), dice)
    assert at(fit.coefficients(), POINTS[2]) == pytest.approx(at(slower, POINTS[2]), rel=0.1)


def test_hours_of_one_request_at_a_time_unlearn_nothing_and_blow_nothing_up() -> None:
    fit, dice = Fit(PRIOR), random.Random(5)
    for _ in range(300):
        teach(fit, FASTER, wide(dice), dice)
    for _ in range(20_000):
        teach(fit, FASTER, alone(dice), dice)
    assert worst(fit, FASTER) < 0.1


def test_a_term_that_samples_do_not_show_keeps_its_place_beside_the_others() -> None:
    """Only steps of no context: its cost follows the speed of the machine."""
    fit, dice = Fit(PRIOR), random.Random(6)
    twice: Three = (2 * PRIOR[0], 2 * PRIOR[1], 2 * PRIOR[2])
    for _ in range(300):
        teach(fit, twice, (1.0, dice.randint(1, 64), 0.0), dice)
    assert fit.coefficients()[2] == pytest.approx(twice[2], rel=0.1)


def test_a_term_that_costs_nothing_is_found_out() -> None:
    fit, dice = Fit(PRIOR), random.Random(7)
    free: Three = (3e-3, 0.0, 1e-8)
    for _ in range(500):
        teach(fit, free, wide(dice), dice)
    assert worst(fit, free) < 0.05


samples = st.lists(
    st.tuples(
        st.floats(1.0, 1e5),
        st.floats(0.0, 1e10),
        st.floats(1e-9, 1e6),
    ),
    max_size=60,
)


@given(samples)
@example([(3.0, 6.0, 1e-9), (1.0, 0.0, 16.0)])
@example([(1.0, 0.0, 1e-9), (1.0, 1.0, 1.0)])
def test_whatever_is_measured_no_coefficient_is_below_0(measured: list[Three]) -> None:
    fit = Fit(PRIOR)
    for size, context, seconds in measured:
        fit.learn((1.0, size, context), seconds)
        assert min(fit.coefficients()) >= 0.0
        assert max(fit.coefficients()) < float("inf")
    assert fit.samples == len(measured)
