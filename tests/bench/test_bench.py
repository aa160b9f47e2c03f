"""The command: all benchmarks on real processes with a tiny model, where only the figures are made small."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from tests.tiny import VOCAB, tiny_model

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def row(reports: list[dict[str, Any]], benchmark: str, name: str) -> dict[str, Any]:
    report = next(report for report in reports if report["benchmark"] == benchmark)
    return next(row for row in report["rows"] if row["name"].startswith(name))


@pytest.mark.cluster
def test_all_benchmarks_measure_and_are_written_down(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", max_position_embeddings=8192)
    file = tmp_path / "figures.json"
    small = ["--requests", "4", "--streams", "2", "--prompt-tokens", "64", "--vocab", str(VOCAB)]
    done = bench("all", "--model", str(model), "--runs", "1", "--json", str(file), *small)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    reports = json.loads(file.read_text())
    assert [report["benchmark"] for report in reports] == ["start", "tax", "reuse", "overlap", "load"]
    assert row(reports, "reuse", "cached tokens")["measured"]["median"] == 2992
    assert row(reports, "load", "requests answered")["measured"]["median"] == 4
    assert row(reports, "load", "requests failed")["measured"]["median"] == 0
    for name in ("TTFT, 512", "TTFT, 2,048", "TPOT, 1", "TPOT, 8"):
        measured = row(reports, "tax", name)
        assert measured["ratio"] > 0
        assert measured["limit"] == 1.15
        assert name in done.stdout
    assert row(reports, "overlap", "visible store")["against"]["median"] > 0
    assert 0 < row(reports, "start", "memory after 7,000")["measured"]["median"] < 3
    assert {"command", "seed", "threads", "processor", "torch", "load average"} <= reports[0]["about"].keys()


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for word in ("tax", "reuse", "overlap", "start", "load", "all", "--json", "examples"):
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
