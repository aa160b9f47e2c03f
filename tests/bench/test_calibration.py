"""A cost model that made the probes is found again from them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.calibration import (
    ANSWER,
    CONTEXTS,
    FASTEST_BYTES_S,
    MIXED,
    PAIRED,
    PROMPTS,
    STREAMS,
    Probes,
    fit_bytes_s,
    fit_passes,
    fit_steps,
    nonnegative_fit,
    speeds,
)
from simulator.cost import PassCost, StepCost

PASS = PassCost(0.03, 1.2e-3, 4e-7)
STEP = StepCost(0.025, 4e-3, 2e-6)
PAIR = 0.8


def passes_s(tokens: int, chunk: int) -> float:
    starts = range(0, tokens, chunk)
    sizes = [(min(chunk, tokens - start), start) for start in starts]
    return sum(PASS.base_s + PASS.token_s * n + PASS.pair_s * n * (p + n / 2) for n, p in sizes)


def step_s(streams: int, context: int) -> float:
    batch = max(streams / 2, 1)
    alone = STEP.base_s + STEP.row_s * batch + STEP.token_s * batch * (context + ANSWER / 2)
    return alone / (PAIR if streams > 1 else 1.0)


def test_the_cost_of_passes_is_found() -> None:
    found = fit_passes({tokens: passes_s(tokens, 512) for tokens in PROMPTS}, 512)
    assert (found.base_s, found.token_s, found.pair_s) == pytest.approx((PASS.base_s, PASS.token_s, PASS.pair_s))


def test_the_cost_of_steps_is_found_although_two_slow_each_other_down() -> None:
    seen = {key: step_s(*key) for key in itertools.product(STREAMS, CONTEXTS)}
    found = fit_steps(seen, PAIR)
    assert (found.base_s, found.row_s, found.token_s) == pytest.approx((STEP.base_s, STEP.row_s, STEP.token_s))


def seen_probes(mixed_ttft_s: float = 1.25, mixed_tpot_s: float = 0.25) -> Probes:
    probes = Probes()
    for tokens in PAIRED:
        probes.alone[tokens], probes.paired[tokens] = [1.0, 1.0, 9.0], [1.25] * 4
    for context in CONTEXTS:
        probes.steps[1, context], probes.steps[2, context] = [0.2], [0.25]
    for slower, at_once_and_streams in enumerate(MIXED, start=1):
        probes.mixed[at_once_and_streams] = [(slower * mixed_ttft_s, slower * mixed_tpot_s)]
    return probes


def test_busy_instances_are_as_slow_as_prefill_and_decode_show_in_the_mean() -> None:
    assert speeds(seen_probes()) == pytest.approx((1.0, 0.8, 0.4, 0.8 / 3))
    lopsided = speeds(seen_probes(mixed_ttft_s=1.0, mixed_tpot_s=0.3))
    assert lopsided[2] == pytest.approx((1 / 2 * 1 / 3) ** 0.5), "three: both sides weigh equally"


def test_more_busy_instances_are_never_faster() -> None:
    assert speeds(seen_probes(0.2, 0.04))[:2] == (1.0, 1.0)
    found = speeds(seen_probes())
    assert list(found) == sorted(found, reverse=True)


def test_copying_is_as_fast_as_a_pass_had_to_wait_for() -> None:
    assert fit_bytes_s(warm_s=0.1, size=10**8, compute_s=0.02) == pytest.approx(1e9)
    assert fit_bytes_s(warm_s=0.021, size=10**8, compute_s=0.02) == FASTEST_BYTES_S


costs = st.lists(st.floats(0, 10).map(lambda x: round(x, 2)), min_size=3, max_size=3)


@given(costs)
def test_a_fit_is_never_negative_and_finds_what_there_is(cost: list[float]) -> None:
    terms = [(1.0, x, y) for x in (1.0, 2.0, 5.0) for y in (1.0, 3.0, 4.0)]
    values = [sum(c * t for c, t in zip(cost, row, strict=True)) + 0.01 for row in terms]
    found = nonnegative_fit(terms, values)
    assert min(found) >= 0
    for row, value in zip(terms, values, strict=True):
        assert sum(c * t for c, t in zip(found, row, strict=True)) == pytest.approx(value, rel=0.02)


def test_a_term_that_would_be_negative_is_left_out() -> None:
    assert nonnegative_fit([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0])[1] == 0.0
