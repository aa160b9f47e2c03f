"""`dango sim scheduling` runs all four placements, tells order and ratios, and says so when the order breaks."""

import json
from pathlib import Path
from typing import Any

import pytest

import simulator.__main__ as command
from simulator.experiments import scheduling


def a_report(**means: float) -> dict[str, Any]:
    """Runs that never ran, at one speed."""
    return {
        "runs": {
            f"2x / {placement}": {
                "summary": {
                    "ttft_s": {"mean": mean, "p90": 2 * mean, "p99": 3 * mean},
                    "hit_rate": 0.3,
                    "refused": 0,
                    "failed": 0,
                }
            }
            for placement, mean in means.items()
        }
    }


PAPERS = a_report(**scheduling.PAPER_S)


def test_the_papers_own_figures_hold_their_order_and_reach_the_goal() -> None:
    order, goal = scheduling.notes(PAPERS)
    assert order == "2x: the paper's order holds; global is 14.2 % below local (the paper: 14.2 % below)."
    assert goal == "The goal of 12% below local is reached: at best 14.2%, at 2x."
    row = next(line for line in scheduling.table(PAPERS).splitlines() if line.startswith("2x random"))
    assert row.split() == ["2x", "random", "19.65", "39.30", "58.95", "6.40", "6.40", "0.300", "0"]


def test_an_order_that_breaks_and_a_goal_that_is_missed_are_told() -> None:
    order, goal = scheduling.notes(
        a_report(random=9.0, load_balance=10.0, local_cache_aware=4.0, global_cache_aware=4.4)
    )
    assert "does not hold: random is not above load_balance, local_cache_aware is not above" in order
    assert "global is 10.0 % above local" in order
    assert "missed" in goal


def test_a_slice_runs_with_every_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--limit", "30", "--prefill", "2", "--decode", "1", "--speeds", "2", "--output-limit", "2"]
    path = tmp_path / "out.json"
    assert command.main(["scheduling", *words, "--json", str(path), "--plot", str(tmp_path)]) == 0
    runs = json.loads(path.read_text())["runs"]
    assert list(runs) == [f"2x / {placement}" for placement in scheduling.PAPER_S]
    assert all(one["summary"]["finished"] == 30 for one in runs.values())
    assert "2x: the paper's order" in capsys.readouterr().out
    assert {"ttft.png", "ratios.png", "latency.png"} <= {one.name for one in tmp_path.iterdir()}
