"""`dango sim caches` holds one global cache against local ones and an ideal pool, and tells how copies grow."""

import json
from pathlib import Path
from typing import Any

import pytest

import simulator.__main__ as command
from simulator.experiments import caches
from simulator.hitrates import ideal_hit_rate
from simulator.workload import BLOCK_TOKENS, Arrival


def a_trace(hit_rate: float) -> dict[str, Any]:
    """What a trace came to that was never run: global has this hit rate, each local cache a tenth."""

    def one(rate: float) -> dict[str, Any]:
        copies = [[], [3, 1], [2, 1]]
        summary = {"hit_rate": rate, "prefill_s": 100 * (1 - rate), "ttft_s": {"mean": 1.0}}
        return {
            "setup": {"prefill": 4},
            "summary": summary,
            "series": {"at_s": [0.0, 10.0, 20.0], "copies": copies},
        }

    runs = {caches.GLOBAL: one(hit_rate), **{placement: one(0.1) for placement in caches.LOCAL}}
    return {"ideal": 0.5, "runs": runs, "copies": {"1x": runs[caches.GLOBAL]}}


def test_the_goal_is_a_share_of_the_ideal() -> None:
    assert (
        "99.0 % of what one ideal pool would; the goal of 98% is reached" in caches.notes("t", a_trace(0.495))[0]
    )
    assert "97.0 % of what one ideal pool would; the goal of 98% is missed" in caches.notes("t", a_trace(0.485))[0]


def test_each_router_is_told_with_what_global_gains_over_it() -> None:
    told = caches.notes("t", a_trace(0.4))
    assert "Against random (the router knows nothing): 4.00 times the hit rate, 33.3 % less prefill" in "\n".join(
        told
    )
    assert told[-1] == "The hottest 100 blocks are on at most 2.0 at 1x of the nodes, in the mean over them."


def test_without_copies_there_is_nothing_to_tell_of_them(tmp_path: Path) -> None:
    report = {"traces": {"t": {**a_trace(0.4), "copies": {}}}}
    assert "copies" not in caches.table(report)
    assert {path.name for path in caches.draw(report, tmp_path)} == {"hits-t.png", "prefill-t.png"}


def test_the_ideal_counts_tokens_of_full_blocks_and_computes_the_last() -> None:
    one, two, more = ([0, 1], [0, 1], [0, 1, 2])
    arrivals = [
        Arrival(0.0, 2 * BLOCK_TOKENS, 1, one),
        Arrival(1.0, 2 * BLOCK_TOKENS, 1, two),  # all of it is there, but its last token must be computed
        Arrival(2.0, 2 * BLOCK_TOKENS + 1, 1, more),
    ]
    tokens = 6 * BLOCK_TOKENS + 1
    assert ideal_hit_rate(arrivals, 10 * BLOCK_TOKENS) == pytest.approx((1 + 2) * BLOCK_TOKENS / tokens)
    assert ideal_hit_rate(arrivals, BLOCK_TOKENS) == pytest.approx((1 + 1) * BLOCK_TOKENS / tokens)
    assert ideal_hit_rate([], 100) == 0.0


def test_a_slice_runs_with_every_placement_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    words = ["--traces", "conversation", "--limit", "60", "--prefill", "2", "--copy-speeds", "1", "3"]
    assert command.main(["caches", *words, "--json", str(path), "--plot", str(tmp_path)]) == 0
    found = json.loads(path.read_text())["traces"]["conversation"]
    rates = {placement: one["summary"]["hit_rate"] for placement, one in found["runs"].items()}
    assert list(rates) == [caches.GLOBAL, *caches.LOCAL]
    assert 0 < rates["random"] <= rates[caches.GLOBAL] <= found["ideal"]
    assert found["copies"]["1x"] == found["runs"][caches.GLOBAL]
    assert found["copies"]["3x"]["series"]["copies"][-1][0] == 2
    assert "copies at the end, speed" in capsys.readouterr().out
    assert (tmp_path / "copies-conversation.png").exists()
    assert (tmp_path / "copies-by-load.png").exists()
