"""The derived cost models say what is known of such nodes; a fitted one is read back as it was written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.cost import (
    LLAMA2_70B,
    LLAMA3_70B,
    MODELS,
    BadCostModel,
    PassCost,
    StepCost,
    body_of,
    cost_model,
    this_machine,
)


def test_the_models_have_their_published_sizes() -> None:
    assert LLAMA2_70B.weights == pytest.approx(69.0e9, rel=0.002)
    assert LLAMA3_70B.weights == pytest.approx(70.6e9, rel=0.002)
    assert {model.kv_bytes_token for model in MODELS.values()} == {320 * 1024}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_node_takes_the_times_that_are_known_of_it(model) -> None:  # type: ignore[no-untyped-def]
    assert 1.3 < model.prefill_s(12_000, 0) < 1.6
    assert 0.040 < model.step_s(50, 50 * 12_000) < 0.050
    assert 1.2e6 < model.pages_tokens < 1.5e6


def test_loading_pays_above_the_bandwidth_that_the_paper_gives() -> None:
    """At 8,192 tokens, loading beats computing above about 6 GB/s (FAST 2025, at full arithmetic rate)."""
    model = MODELS["llama3-70b-a800"]
    bytes_s = 8_192 * model.kv_bytes_token / model.prefill_s(8_192, 0)
    assert 2e9 < bytes_s < 6e9


def test_a_longer_prefix_costs_pairs_and_chunks_cost_launches() -> None:
    model = MODELS["llama3-70b-a800"]
    whole = model.prefill_s(8_000, 0)
    parts = model.prefill_s(4_000, 0) + model.prefill_s(4_000, 4_000)
    assert parts == pytest.approx(whole + model.prefill.base_s)


def test_a_fitted_model_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    model = replace(MODELS["llama3-70b-a800"], name="here")
    path.write_text(json.dumps(body_of(model)))
    assert this_machine(path) == model == cost_model(str(path))
    assert cost_model("llama2-70b-a800") is MODELS["llama2-70b-a800"]


@pytest.mark.parametrize(
    "change",
    [{"layers": 0}, {"prefill": {"base_s": 1}}, {"wings": 2}, {"host_bytes_s": "fast"}, {"step": [1, 2, 3]}],
)
def test_what_is_no_cost_model_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**body_of(MODELS["llama3-70b-a800"]), **change}))
    with pytest.raises(BadCostModel, match=r"bad\.json: not a cost model"):
        this_machine(path)


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    with pytest.raises(BadCostModel, match=r"there are llama2-70b-a800 and llama3-70b-a800, or a \.json file"):
        cost_model("llama4")


def test_a_cost_that_is_negative_or_nothing_is_refused() -> None:
    model = MODELS["llama3-70b-a800"]
    with pytest.raises(ValueError, match="no cost is negative"):
        replace(model, prefill=PassCost(-1.0, 1.0, 0.0))
    with pytest.raises(ValueError, match="take time"):
        replace(model, step=StepCost(0.0, 1.0, 1.0))


def test_what_a_request_costs_and_who_shares_cores_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    model = replace(MODELS["llama3-70b-a800"], request_s=0.01, speeds=(1.0, 0.9))
    path.write_text(json.dumps(body_of(model)))
    assert this_machine(path) == model
    with pytest.raises(ValueError, match="speeds are above 0"):
        replace(model, speeds=(1.0, 0.0))
