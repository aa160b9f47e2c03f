"""A recorded live run is simulated again, request by request, and held against what was recorded."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from conductor.ask import Priority
from simulator.__main__ import main
from simulator.cost import CostModel, PassCost, StepCost, body_of
from simulator.experiments.truth import Part, Recording, Sent, compared, figure, seen_of, setups, table
from simulator.record import Outcome
from simulator.workload import BadTrace

COST = CostModel(
    name="small",
    layers=4,
    kv_bytes_token=1024,
    prefill=PassCost(0.01, 0.001, 0.0),
    step=StepCost(0.02, 0.01, 0.0),
    host_bytes_s=1e9,
    network_bytes_s=1e9,
    pages_tokens=16_384,
    request_s=0.005,
    speeds=(1.0, 0.8),
)
SETTINGS = {"prefill": 2, "decode": 2, "block_tokens": 16, "chunk_tokens": 512, "steps_max": 1, "report_s": 0.5}


def sent(number: int, ttft_s: float | None = 0.07, tpot_s: float | None = 0.03, refused: str = "") -> Sent:
    return Sent(2.0 * number, 50, 11, [4 * number + k for k in range(4)], ttft_s, tpot_s, refused)


def recording() -> Recording:
    """Requests far apart: each is alone."""
    parts = [Part("calm", 30.0, 0.5, 1, [sent(number) for number in range(5)])]
    return Recording({"processor": "small"}, body_of(COST), SETTINGS, parts)


def outcome(first_s: float | None, end_s: float, refused: str = "") -> Outcome:
    return Outcome(1.0, 50, 0 if refused else 11, Priority.INTERACTIVE, end_s, refused, first_token_s=first_s)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    path = tmp_path / "live.json"
    path.write_text(json.dumps(recording().body()))
    return path


def test_it_is_read_back_as_it_was_written(live: Path) -> None:
    assert json.dumps(Recording.read(live).body()) == json.dumps(recording().body())


def test_it_may_be_compressed(live: Path, tmp_path: Path) -> None:
    packed = tmp_path / "live.json.xz"
    packed.write_bytes(lzma.compress(live.read_bytes()))
    assert Recording.read(packed) == Recording.read(live)
    packed.write_bytes(live.read_bytes())
    with pytest.raises(BadTrace, match="not a recorded run"):
        Recording.read(packed)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"parts": [{}]}', '{"parts": 3}'])
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "live.json").write_text(text)
    with pytest.raises(BadTrace, match=r"live\.json: not a recorded run"):
        Recording.read(tmp_path / "live.json")


def test_a_setup_says_what_was_sent_and_how_the_service_was_set(tmp_path: Path) -> None:
    made = setups(recording(), tmp_path)["calm"]
    assert made.cost() == COST
    assert [one.blocks for one in made.arrivals()] == [one.blocks for one in recording().parts[0].requests]
    assert [one.at_s for one in made.arrivals()] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert (made.prefill, made.block_tokens, made.ttft_limit_s, made.tbt_limit_s) == (2, 16, 30.0, 0.5)


def test_a_lone_request_takes_what_the_cost_model_says(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TTFT: what comes before, and a pass of 50 tokens. TPOT: a step of one row; messages take a little more."""
    assert main(["truth", "--live", str(live), "--json", "-"]) == 0
    part = json.loads(capsys.readouterr().out)["parts"]["calm"]
    ttft, tpot, refused = part["figures"][:3]
    assert part["requests"] == 4
    assert ttft["simulated"] == pytest.approx(0.065, rel=0.05)
    assert tpot["simulated"] == pytest.approx(0.030, rel=0.05)
    assert (refused["live"], refused["simulated"]) == (0, 0)
    assert all(line["agrees"] for line in (ttft, tpot, refused))


def test_a_run_of_the_real_service_is_simulated_to_within_a_factor_of_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["truth", "--json", "-"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert parts.keys() == {"moderate", "overload"}
    for part in parts.values():
        ttft, tpot, refused = part["figures"][:3]
        assert 0.5 < ttft["ratio"] < 2
        assert 0.5 < tpot["ratio"] < 2
        assert abs(refused["simulated"] - refused["live"]) <= 3


def test_it_is_told_drawn_and_kept(live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["truth", "--live", str(live), "--keep", str(tmp_path / "kept"), "--plot", str(tmp_path)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "median TPOT" in told
    assert " yes" in told
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"cost.json", "calm.jsonl"}
    assert (tmp_path / "truth-ttft.png").exists()
    assert (tmp_path / "truth-tpot.png").exists()


def test_settings_that_are_none_are_told(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live.write_text(json.dumps(replace(recording(), settings={"wings": 2}).body()))
    assert main(["truth", "--live", str(live)]) == 1
    assert "wings" in capsys.readouterr().err


def test_a_client_sees_the_hand_over_in_its_tpot() -> None:
    seen = seen_of(outcome(1.5, 2.5))
    assert (seen.ttft_s, seen.tpot_s) == (pytest.approx(0.5), pytest.approx(0.1))
    refused = seen_of(outcome(None, 3.0, "ttft"))
    assert (refused.ttft_s, refused.tpot_s, refused.refused) == (None, None, "ttft")


def test_the_first_requests_are_not_judged() -> None:
    part = Part("busy", 5.0, 0.5, 2, [sent(0, None, None, "ttft"), sent(1), sent(2), sent(3, None, None, "ttft")])
    body = compared(
        part, [outcome(None, 2, "ttft"), outcome(1.1, 2), outcome(None, 2, "ttft"), outcome(None, 2, "ttft")]
    )
    refused = body["figures"][2]
    assert (body["requests"], refused["live"], refused["simulated"], body["refused_in_both"]) == (2, 1, 2, 1)
    assert refused["agrees"] is False
    assert " NO" in table({"parts": {"busy": body}})


def test_agreement_is_a_share_of_the_live_figure() -> None:
    assert figure("x", 1.0, 1.19, 0.2)["agrees"] is True
    assert figure("x", 1.0, 0.79, 0.2)["agrees"] is False
    assert figure("x", 0, 0, 0.1)["agrees"] is True
    assert figure("x", 0, 1, 0.1)["agrees"] is False
    assert figure("x", 1.0, 9.0)["agrees"] is None
