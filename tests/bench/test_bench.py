"""The command: each benchmark on real processes, with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import QUIET_THREADS, main
from bench.rivals import MOONCAKE_PYTHON, NoRival, mooncake, redis_server
from simulator.experiments.truth import Recording
from tests.tiny import VOCAB, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(
        argv, cwd=ROOT, env=os.environ | QUIET_THREADS, capture_output=True, text=True, timeout=100
    )


def measured(model: Path, folder: Path, name: str, *more: str) -> dict[str, dict[str, Any]]:
    """The rows of one benchmark by name, as they were written down. The same are shown."""
    file = folder / "figures.json"
    done = bench(name, "--model", str(model), "--runs", "1", "--json", str(file), *more)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    [report] = json.loads(file.read_text())
    assert report["benchmark"] == name
    assert {"command", "seed", "threads", "processor", "torch", "load average"} <= report["about"].keys()
    assert all(row["name"].strip() in done.stdout for row in report["rows"])
    return {row["name"]: row for row in report["rows"]}


@pytest.mark.cluster
def test_the_tax_is_a_ratio_of_the_service_and_its_engine(model: Path, tmp_path: Path) -> None:
    rows = measured(model, tmp_path, "tax")
    assert list(rows) == ["TTFT, 512 tokens", "TTFT, 2,048 tokens", "TPOT, 1 streams", "TPOT, 8 streams"]
    assert all(row["ratio"] > 0 and row["limit"] == 1.15 for row in rows.values())


@pytest.mark.cluster
def test_a_warm_prefix_is_reused_in_whole_blocks(model: Path, tmp_path: Path) -> None:
    rows = measured(model, tmp_path, "reuse")
    assert rows["cached tokens of 3,064"]["measured"]["median"] == 2992
    assert rows["TTFT, warm against cold"]["ratio"] < 1


@pytest.mark.cluster
def test_storing_is_measured_on_both_sides(model: Path, tmp_path: Path) -> None:
    row = measured(model, tmp_path, "overlap")["visible store, 2,048 tokens"]
    assert row["measured"]["median"] > 0
    assert row["against"]["median"] > 0


@pytest.mark.cluster
def test_predictions_are_compared_with_what_they_predicted(model: Path, tmp_path: Path) -> None:
    rows = measured(model, tmp_path, "estimates")
    assert list(rows) == ["error of predicted prefill passes", "error of predicted decode steps"]
    assert all(row["measured"]["count"] > 1 and row["measured"]["low"] >= 0 for row in rows.values())


@pytest.mark.cluster
def test_the_start_and_the_memory_of_every_process_are_measured(model: Path, tmp_path: Path) -> None:
    rows = measured(model, tmp_path, "start")
    assert 0 < rows["start to ready"]["measured"]["median"] < 100
    parts = [row["measured"]["median"] for name, row in rows.items() if "of that" in name]
    assert len(parts) == 6
    assert sum(parts) == pytest.approx(rows["memory after 7,000 tokens more"]["measured"]["median"], rel=0.1)


@pytest.mark.cluster
@pytest.mark.parametrize("loop", [("--streams", "2"), ("--rate", "20")], ids=["closed", "open"])
def test_load_is_answered(model: Path, tmp_path: Path, loop: tuple[str, str]) -> None:
    small = ["--requests", "4", "--prompt-tokens", "64", "--vocab", str(VOCAB)]
    rows = measured(model, tmp_path, "load", *small, *loop)
    assert rows["requests answered"]["measured"]["median"] == 4
    assert rows["requests failed"]["measured"]["median"] == 0


@pytest.mark.cluster
@pytest.mark.long
def test_a_live_run_is_recorded_and_simulated(model: Path, tmp_path: Path) -> None:
    recording = tmp_path / "live.json"
    rows = measured(model, tmp_path, "truth", "--span", "2", "--record", str(recording))
    assert rows["moderate: median TTFT, simulated"]["ratio"] > 0
    parts = Recording.read(recording).parts
    assert [part.name for part in parts] == ["moderate", "overload"]
    assert all(one.refused or one.ttft_s for part in parts for one in part.requests)


@pytest.mark.cluster
def test_the_store_is_measured_beside_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    argv = [sys.executable, "-m", "bench.store", "--runs", "1", "--peers", "none", "--json", str(file)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    [report] = json.loads(file.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    for name in ("1.1 MB", "11.8 MB"):
        for way, limit in (
            ("put, shared memory, against memcpy", 1 / 0.7),
            ("get, TCP, against a raw socket", 1.25),
        ):
            assert rows[f"{name}: {way}"]["limit"] == limit
            assert rows[f"{name}: {way}"]["ratio"] > 0
    assert rows["lookup of 200 blocks, 16 at once"]["limit"] == 200
    assert not any("Redis" in name or "Mooncake Store" in name for name in rows)


@pytest.mark.cluster
def test_the_grain_is_measured_for_both_ways(model: Path, tmp_path: Path) -> None:
    rows = measured(model, tmp_path, "grain")
    assert len(rows) == 2 * 2 * 2 * 4  # sizes of blocks, ways, whom it is compared with, counts
    assert rows["1 blocks, TCP: in bulk, against all layers one by one"]["ratio"] > 0


def test_a_rival_that_is_not_there_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOONCAKE_PYTHON, "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoRival, match="names no interpreter"):
        mooncake(1, 1, 1)
    with pytest.raises(NoRival, match="no redis-server"), redis_server():
        pass


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for word in (
        "tax",
        "reuse",
        "overlap",
        "start",
        "estimates",
        "decision",
        "load",
        "truth",
        "all",
        "--json",
        "examples",
    ):
        assert word in told


@pytest.mark.parametrize("words", [["speed"], [], ["tax", "--runs", "0"], ["tax", "--rate", "fast"]])
def test_what_cannot_be_measured_is_refused_with_the_word(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert (words[-1] if words else "NAME") in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told_in_a_sentence() -> None:
    done = bench("tax", "--model", "/nowhere/m.gguf")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "/nowhere/m.gguf" in done.stderr
