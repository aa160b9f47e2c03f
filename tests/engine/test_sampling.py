"""Choosing tokens: each limit and penalty against its definition, draws against the distribution they promise."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine.api import Draw, Sampled, Sampling
from engine.sampling import LOGPROB_MIN, NUCLEUS_FIRST, Floats, sample, uniform

rows_of_logits = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).normal(0, 4, 40).astype(np.float32)
)


def logits_of(*probabilities: float) -> Floats:
    return np.log(np.array(probabilities, dtype=np.float32))


def draw(prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **fields: Any) -> Draw:
    return Draw(Sampling(**fields), prompt, output)


def shares(logits: Floats, count: int = 4000, **fields: Any) -> list[float]:
    """How often each token comes, over many positions of one request."""
    drawn = [sample(logits, draw(prompt=(0,) * at, seed=7, **fields)).token for at in range(count)]
    return [float(n) / count for n in np.bincount(drawn, minlength=len(logits))]


# --- greedy ---


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals():
    assert sample(logits_of(0.2, 0.4, 0.4), draw(temperature=0)).token == 1


@given(rows_of_logits, st.floats(0.01, 5), st.integers(0, 2**63 - 1))
def test_limits_that_leave_one_token_are_greedy(logits: Floats, temperature: float, seed: int):
    best = int(logits.argmax())
    for limit in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert sample(logits, draw(temperature=temperature, seed=seed, **limit)).token == best


@given(rows_of_logits)
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(logits: Floats):
    for temperature in (1e-6, 1e-300, 5e-324):
        assert sample(logits, draw(temperature=temperature)).token == int(logits.argmax())


# --- draws ---


def test_draws_follow_the_distribution():
    assert shares(logits_of(0.5, 0.3, 0.2), temperature=1) == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_temperature_sharpens_and_flattens():
    # probabilities to the power 1 / temperature, renormalised
    assert shares(logits_of(0.8, 0.2), temperature=0.5) == pytest.approx([16 / 17, 1 / 17], abs=0.03)
    assert shares(logits_of(0.8, 0.2), temperature=2) == pytest.approx([2 / 3, 1 / 3], abs=0.03)


def test_top_k_keeps_the_likeliest_and_renormalises():
    assert shares(logits_of(0.1, 0.5, 0.4), temperature=1, top_k=2) == pytest.approx([0, 5 / 9, 4 / 9], abs=0.03)


def test_top_k_breaks_ties_by_id():
    assert shares(logits_of(0.25, 0.25, 0.25, 0.25), temperature=1, top_k=2)[2:] == [0, 0]


def test_top_p_keeps_the_token_that_crosses_the_limit():
    kept = shares(logits_of(0.15, 0.5, 0.35), temperature=1, top_p=0.6)
    assert kept == pytest.approx([0, 50 / 85, 35 / 85], abs=0.03)


def test_top_p_counts_what_top_k_has_left():
    # of the two that top_k leaves, the first has 5/9 of the mass and so reaches 0.55 alone
    assert shares(logits_of(0.1, 0.5, 0.4), temperature=1, top_k=2, top_p=0.55) == [0, 1, 0]


def test_top_p_over_more_tokens_than_it_first_looks_at():
    size = 3 * NUCLEUS_FIRST
    drawn = shares(np.zeros(size, dtype=np.float32), temperature=1, top_p=0.5)
    assert max(np.flatnonzero(drawn)) < size / 2
    assert np.count_nonzero(drawn) > NUCLEUS_FIRST


def test_min_p_is_relative_to_the_likeliest():
    kept = shares(logits_of(0.5, 0.26, 0.24), temperature=1, min_p=0.5)
    assert kept == pytest.approx([50 / 76, 26 / 76, 0], abs=0.03)


@given(rows_of_logits, st.floats(0.05, 3), st.integers(0, 41), st.floats(0.01, 1), st.floats(0, 1))
def test_whatever_the_limits_a_token_within_them_comes(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float
):
    token = sample(logits, draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)).token
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    assert weights[token] >= min_p * (1 - 1e-6)
    assert top_k == 0 or (weights > weights[token]).sum() < top_k
    assert weights[weights > weights[token]].sum() <= top_p * weights.sum() * (1 + 1e-6)


# --- seeds ---


@given(rows_of_logits, st.integers(-(2**63), 2**63 - 1), st.integers(0, 200))
def test_a_draw_is_a_function_of_seed_and_position(logits: Floats, seed: int, cut: int):
    said = tuple(token % 40 for token in range(200))
    first = sample(logits, draw(said[:cut], said[cut:], seed=seed))
    assert first == sample(logits, draw(said, (), seed=seed)), "prompt or output: only their sum counts"


def test_random_numbers_are_fixed_for_ever():
    """Other values would change the text of a seed between versions, or between two instances of a cluster."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 5)] == [
        0.011546754286331562,
        0.5023796042735054,
        0.3035680343067586,
        0.46292535650502586,
    ]


def test_neighbouring_seeds_and_positions_are_independent():
    grid = np.array([[uniform(seed, position) for position in range(60)] for seed in range(60)])
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.06
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.06
    assert grid.mean() == pytest.approx(0.5, abs=0.03)


# --- penalties and stops ---


def after(logits: Floats, **fields: Any) -> int:
    return sample(logits, draw(temperature=0, **fields)).token


def test_presence_counts_once_and_frequency_each_time_and_only_output():
    logits = np.array([1.0, 0.8], dtype=np.float32)
    assert after(logits, prompt=(0, 0, 0), presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert after(logits, output=(0,), presence_penalty=0.3) == 1
    assert after(logits, output=(0, 0, 0), presence_penalty=0.1) == 0
    assert after(logits, output=(0, 0, 0), frequency_penalty=0.1) == 1
    assert after(logits, output=(1,), presence_penalty=-0.3) == 1


@given(rows_of_logits, st.lists(st.integers(0, 39), min_size=2, max_size=20), st.floats(0.2, 4))
@settings(max_examples=30)
def test_repetition_penalty_equals_transformers(logits: Floats, said: list[int], penalty: float):
    reference = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([said]), torch.from_numpy(logits.copy())[None]
    )
    ours = after(logits, prompt=tuple(said[:1]), output=tuple(said[1:]), repetition_penalty=penalty)
    assert reference[0, ours] >= reference.max() - 1e-5


def test_stop_tokens_are_barred_until_the_output_is_long_enough():
    logits = logits_of(0.9, 0.06, 0.04)
    barred = {"stop_tokens": [0, 1], "min_tokens": 2}
    assert [after(logits, output=(2,) * said, **barred) for said in range(4)] == [2, 2, 0, 0]


def test_the_logits_are_left_as_they_were():
    logits = logits_of(0.9, 0.1)
    kept = logits.copy()
    after(logits, output=(0,), repetition_penalty=2.0, stop_tokens=[0], min_tokens=5, logprobs=1)
    assert np.array_equal(logits, kept)


# --- logprobs (B20) ---


def test_logprobs_are_of_the_raw_distribution():
    sampled = sample(
        logits_of(0.5, 0.3, 0.2), draw(output=(0,), temperature=0.1, presence_penalty=2.0, logprobs=2)
    )
    assert sampled.token == 1
    assert sampled.logprob == pytest.approx(math.log(0.3))
    assert sampled.top_tokens == [0, 1]
    assert sampled.top_logprobs == pytest.approx([math.log(0.5), math.log(0.3)])


def test_none_reports_nothing_and_zero_only_the_token():
    logits = logits_of(0.5, 0.5)
    assert sample(logits, draw(temperature=0)) == Sampled(0)
    only = sample(logits, draw(temperature=0, logprobs=0))
    assert (only.logprob, only.top_tokens) == (pytest.approx(math.log(0.5)), [])


@pytest.mark.parametrize("count", [0, 5, 20])
def test_logprobs_are_finite_json_whatever_the_logits(count: int):
    logits = np.full(30, -np.inf, dtype=np.float32)
    logits[:3] = [3e38, 0.0, -3e38]
    sampled = sample(logits, draw(temperature=1, top_p=1e-6, logprobs=count))
    assert sampled.logprob is not None
    numbers = [sampled.logprob, *sampled.top_logprobs]
    json.dumps(numbers, allow_nan=False)
    assert all(LOGPROB_MIN <= number <= 0 for number in numbers)
    assert len(sampled.top_tokens) == len(sampled.top_logprobs) == count


def test_logits_that_are_no_numbers_are_an_error():
    for wrong in (math.nan, math.inf):
        with pytest.raises(FloatingPointError):
            sample(np.array([0.0, wrong], dtype=np.float32), draw(temperature=0))
