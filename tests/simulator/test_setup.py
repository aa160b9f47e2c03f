"""A setup is a value: checked when made, it travels between processes, and makes the same workload each time."""

import json
from dataclasses import fields, replace
from math import inf, nan
from multiprocessing.reduction import ForkingPickler

import pytest

from conductor.ask import Limits, Priority
from protocol.settings import field_sentences
from simulator.cost import MODELS
from simulator.setup import ADMISSIONS, BadSetup, Setup
from simulator.synthetic import Phase

SMALL = Setup(limit=200)
MADE = Setup(phases=(Phase(60, 2.0), Phase(60, 4.0)), seed=3)


@pytest.mark.parametrize("setup", [SMALL, MADE])
def test_it_travels_to_another_process_as_it_is(setup: Setup) -> None:
    assert ForkingPickler.loads(ForkingPickler.dumps(setup)) == setup
    assert json.loads(json.dumps(setup.body(), allow_nan=False))["limit"] == setup.limit


def test_equal_setups_make_equal_workloads() -> None:
    varied = replace(SMALL, spread=True, thinned=0.5, share_of_batch=0.3)
    assert varied.arrivals() == varied.arrivals() != replace(varied, seed=1).arrivals()
    assert MADE.arrivals() == MADE.arrivals() != replace(MADE, seed=4).arrivals()


def test_one_random_transform_does_not_change_another() -> None:
    classes = [one.priority for one in replace(SMALL, share_of_batch=0.3).arrivals()]
    assert classes == [one.priority for one in replace(SMALL, share_of_batch=0.3, spread=True).arrivals()]
    assert {Priority.BATCH, Priority.INTERACTIVE} == set(classes)


def test_a_slice_is_the_same_one_at_any_speed() -> None:
    slow = replace(SMALL, since_s=60, until_s=120).arrivals()
    fast = replace(SMALL, since_s=60, until_s=120, speed=4).arrivals()
    assert [one.blocks for one in slow] == [one.blocks for one in fast]
    assert [one.at_s / 4 for one in slow] == [one.at_s for one in fast]


def test_lengths_are_changed_as_asked() -> None:
    changed = replace(SMALL, equal_prompts=32_000, outputs_times=6, output_limit=500).arrivals()
    assert {one.tokens for one in changed} == {32_000}
    assert max(one.output for one in changed) == 500


def test_limits_and_costs_are_those_of_its_fields() -> None:
    assert replace(SMALL, ttft_limit_s=5, tbt_limit_s=0.2).limits == Limits(5, 0.2)
    assert SMALL.cost() is MODELS["llama3-70b-a800"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"placement": "best"}, "no placement 'best'"),
        ({"admission": "all"}, "no admission 'all': there are none, at_decode, early, predictive, survival"),
        ({"speed": 0}, "speed must be above 0, not 0"),
        ({"decode": 0}, "decode must be above 0"),
        ({"limit": 0}, "limit and output_limit are at least 1"),
        ({"output_limit": -3}, "limit and output_limit are at least 1"),
        ({"margin": -0.1}, "margin must be at least 0"),
        ({"share_of_batch": 1.5}, "at most 1"),
        ({"hysteresis": 1.0}, "hysteresis and rescue_share are less than 1"),
        ({"rescue_share": inf}, "hysteresis and rescue_share are less than 1"),
        ({"rescue_share": nan}, "rescue_share must be at least 0, not nan"),
        ({"speed": nan}, "speed must be above 0, not nan"),
        ({"steps_max": 0}, "steps_max must be at least 1"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"block_tokens": 48}, "chunk_tokens must be a multiple of block_tokens"),
        ({"block_tokens": 16, "phases": (Phase(1, 1.0),)}, "made traffic has blocks of 512 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadSetup, match=sentence):
        Setup(**change)  # type: ignore[arg-type]


def test_every_field_has_its_sentence() -> None:
    sentences = field_sentences(Setup)
    assert [field.name for field in fields(Setup) if not sentences.get(field.name)] == []
    assert ADMISSIONS[0] == "none"
