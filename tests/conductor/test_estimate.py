"""Predicted times: from reports, for kinds known and unknown, and never better with more to do."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.estimate import KINDS_MAX, Estimates, StepLine
from conductor.kind import CHUNK_TOKENS, PREFILL_PRIOR, STEP_PRIOR
from protocol.ids import Incarnation, SegmentId
from protocol.registry import Pool, Timing

ONE, TWO = Incarnation("one"), Incarnation("two")
CHUNK = 128
BASE_S, TOKEN_S, PAIR_S = 0.05, 1e-3, 1e-6


def pass_s(tokens: int, prefix: int) -> float:
    """What a pass takes on the machine of these tests."""
    return BASE_S + TOKEN_S * tokens + PAIR_S * tokens * (prefix + tokens / 2)


def prompts(count: int, slower: float = 1.0) -> list[Timing]:
    """The passes of prompts of up to 1000 tokens."""
    dice = random.Random(0)
    timings: list[Timing] = []
    for _ in range(count):
        tokens, done = dice.randint(1, 1000), 0
        while done < tokens:
            now = min(CHUNK, tokens - done)
            timings.append(Timing(len(timings) + 1, now, done, slower * pass_s(now, done)))
            done += now
    return timings


def steps(count: int, line: StepLine, first: int = 1) -> list[Timing]:
    dice, timings = random.Random(0), []
    for step in range(first, first + count):
        batch = dice.randint(1, 32)
        context = batch * dice.randint(10, 1000)
        timings.append(Timing(step, batch, context, line.at(batch, context)))
    return timings


def test_without_any_sample_the_documented_defaults_stand() -> None:
    estimates = Estimates()
    base_s, token_s, pair_s = PREFILL_PRIOR
    assert estimates.step("any") == StepLine(*STEP_PRIOR)
    assert estimates.prefill_s("any", 100, 50) == pytest.approx(base_s + 100 * token_s + 10_000 * pair_s)
    assert estimates.fresh(Pool.PREFILL, "any", 0.0) == 0


def test_a_prompt_of_several_passes_costs_each_of_them() -> None:
    estimates = Estimates()
    estimates.learn(Pool.PREFILL, "a", ONE, prompts(50), 0.0)
    real = sum(pass_s(CHUNK, 256 + CHUNK * done) for done in range(3)) + pass_s(17, 256 + CHUNK * 3)
    assert estimates.prefill_s("a", 3 * CHUNK + 17, 256) == pytest.approx(real, rel=0.02)


def test_steps_are_learned_beside_prompts_of_the_same_kind() -> None:
    estimates, line = Estimates(), StepLine(0.02, 1e-4, 1e-7)
    estimates.learn(Pool.PREFILL, "a", ONE, prompts(50), 0.0)
    estimates.learn(Pool.DECODE, "a", TWO, steps(100, line), 0.0)
    assert estimates.step("a").at(16, 8000) == pytest.approx(line.at(16, 8000), rel=0.05)
    assert estimates.prefill_s("a", 100, 0) == pytest.approx(pass_s(100, 0), rel=0.05)


def test_instances_of_one_kind_teach_each_other() -> None:
    estimates = Estimates()
    estimates.learn(Pool.PREFILL, "a", ONE, prompts(5), 0.0)
    alone = estimates.fresh(Pool.PREFILL, "a", 0.0)
    estimates.learn(Pool.PREFILL, "a", TWO, prompts(5), 0.0)
    assert estimates.fresh(Pool.PREFILL, "a", 0.0) == 2 * alone


def test_a_timing_that_comes_twice_is_used_once() -> None:
    estimates = Estimates()
    estimates.learn(Pool.PREFILL, "a", ONE, prompts(5), 0.0)
    once = estimates.fresh(Pool.PREFILL, "a", 0.0)
    estimates.learn(Pool.PREFILL, "a", ONE, prompts(5), 0.0)
    assert estimates.fresh(Pool.PREFILL, "a", 0.0) == once


def test_what_makes_no_sense_is_not_learned() -> None:
    estimates = Estimates()
    nonsense = [(0, 1, 1.0), (-5, 1, 1.0), (1, -1, 1.0), (1, 1, 0.0), (1, 1, float("nan")), (1, 1, float("inf"))]
    timings = [Timing(step, *rest) for step, rest in enumerate(nonsense, 1)]
    timings += [Timing(7, 1, 1, 1.0, -1, 0), Timing(8, 1, 1, 1.0, 1, -1)]
    estimates.learn(Pool.DECODE, "a", ONE, timings, 0.0)
    assert estimates.fresh(Pool.DECODE, "a", 0.0) == 0
    assert estimates.step("a") == StepLine(*STEP_PRIOR)


def test_a_kind_without_samples_is_an_average_one() -> None:
    """Were it taken for slow, it would never get work, nor ever a sample."""
    estimates = Estimates()
    estimates.learn(Pool.PREFILL, "a", ONE, prompts(50), 0.0)
    estimates.learn(Pool.PREFILL, "b", TWO, prompts(50, slower=3.0), 0.0)
    mean = (estimates.prefill_s("a", CHUNK, 0) + estimates.prefill_s("b", CHUNK, 0)) / 2
    assert estimates.prefill_s("new", CHUNK, 0) == pytest.approx(mean)


def test_the_line_of_a_step_is_the_same_object_until_more_is_learned() -> None:
    estimates, line = Estimates(), StepLine(0.02, 1e-4, 1e-7)
    estimates.learn(Pool.DECODE, "a", ONE, steps(10, line), 0.0)
    before = estimates.step("a")
    assert estimates.step("a") is before
    estimates.learn(Pool.DECODE, "a", ONE, steps(10, line, first=11), 0.5)
    assert estimates.step("a") is not before


def test_kinds_without_end_are_not_all_remembered() -> None:
    estimates = Estimates()
    for number in range(KINDS_MAX + 1):
        estimates.learn(Pool.DECODE, f"kind-{number}", Incarnation(str(number)), [Timing(1, 1, 1, 0.1)], 0.0)
    assert estimates.fresh(Pool.DECODE, "kind-0", 0.0) == 0
    assert estimates.fresh(Pool.DECODE, f"kind-{KINDS_MAX}", 0.0) == 1


def test_a_prefix_comes_after_what_its_sender_has_under_way() -> None:
    estimates, source = Estimates(), SegmentId("kvcache-0")
    estimates.learn_transfer(source, 10**9, 10.0, 0.0)
    alone = estimates.transfer_s(source, 10**8)
    assert alone == pytest.approx(1.0, rel=0.02)
    assert estimates.transfer_s(source, 10**8, 10**8) == pytest.approx(2 * alone)


timings = st.builds(
    Timing,
    step=st.integers(1, 1000),
    tokens=st.integers(-1, 10_000),
    context=st.integers(-1, 10**6),
    seconds=st.floats(-1.0, 1e4) | st.sampled_from([float("nan"), float("inf")]),
)
loads = st.tuples(st.integers(0, 5000), st.integers(0, 100_000))


@given(st.lists(timings, max_size=40), loads, loads)
def test_more_to_do_never_makes_a_prediction_better(
    told: list[Timing], less: tuple[int, int], more: tuple[int, int]
) -> None:
    told.sort(key=lambda timing: timing.step)
    estimates = Estimates()
    estimates.learn(Pool.PREFILL, "a", ONE, told, 0.0)
    estimates.learn(Pool.DECODE, "a", TWO, told, 0.0)
    tokens, prefix = less
    batch, context = less
    for kind in ("a", "unknown"):
        known = estimates.prefill_s(kind, tokens, prefix)
        assert 0.0 <= known <= estimates.prefill_s(kind, tokens + more[0], prefix + more[1])
        step = estimates.step(kind).at(batch, context)
        assert 0.0 <= step <= estimates.step(kind).at(batch + more[0], context + more[1])


def test_without_evidence_a_long_prompt_is_cut_as_usual() -> None:
    estimates = Estimates()
    estimates.learn(Pool.PREFILL, "a", ONE, [Timing(1, 22, 0, 0.1)], 0.0)
    one = estimates.prefill_s("a", CHUNK_TOKENS, 0)
    assert estimates.prefill_s("a", 2 * CHUNK_TOKENS, 0) == pytest.approx(2 * one, rel=0.2)


def rests(count: int, line: StepLine, first: int = 1) -> list[Timing]:
    """Steps that computed part of a prompt besides."""
    dice, timings = random.Random(1), []
    for step in range(first, first + count):
        batch, rest, prefix = dice.randint(1, 32), dice.randint(1, CHUNK), dice.randint(0, 1000)
        context = batch * dice.randint(10, 1000)
        timings.append(Timing(step, batch, context, line.at(batch, context) + pass_s(rest, prefix), rest, prefix))
    return timings


def test_what_a_prompt_adds_to_a_step_is_learned_apart_from_the_step() -> None:
    estimates, line = Estimates(), StepLine(0.02, 1e-4, 1e-7)
    estimates.learn(Pool.DECODE, "a", ONE, steps(100, line), 0.0)
    estimates.learn(Pool.DECODE, "a", ONE, rests(100, line, first=101), 0.0)
    rest = estimates.rest("a")
    assert rest is not None
    assert rest.at(50, 500) == pytest.approx(pass_s(50, 500), rel=0.05)
    assert rest.chunk == pytest.approx(CHUNK, abs=5)
    assert estimates.step("a").at(16, 8000) == pytest.approx(line.at(16, 8000), rel=0.05)


def test_before_rests_were_measured_passes_of_the_very_kind_stand_in_for_them() -> None:
    estimates, line = Estimates(), StepLine(0.02, 1e-4, 1e-7)
    estimates.learn(Pool.PREFILL, "a", ONE, prompts(50), 0.0)
    assert estimates.rest("a") is None, "its steps are not known"
    estimates.learn(Pool.DECODE, "a", TWO, steps(20, line), 0.0)
    rest = estimates.rest("a")
    assert rest is not None
    assert rest.at(50, 500) == pytest.approx(pass_s(50, 500), rel=0.05)
    estimates.learn(Pool.DECODE, "b", Incarnation("three"), steps(20, line), 0.0)
    assert estimates.rest("b") is None, "what another kind takes says nothing of what this one can bear"
    estimates.learn(Pool.DECODE, "b", Incarnation("three"), rests(20, line, first=21), 0.0)
    assert estimates.rest("b") is not None


def test_a_rest_that_seems_to_cost_nothing_is_not_believed_to() -> None:
    estimates, line = Estimates(), StepLine(0.02, 1e-4, 1e-7)
    estimates.learn(Pool.DECODE, "a", ONE, steps(50, line), 0.0)
    fast = [Timing(step, 1, 100, line.at(1, 100) / 2, 64, 0) for step in range(51, 71)]
    estimates.learn(Pool.DECODE, "a", ONE, fast, 0.0)
    rest = estimates.rest("a")
    assert rest is not None
    assert rest.at(64, 0) > 0.0
