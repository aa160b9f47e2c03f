"""Plots are PNG files, the same ones for the same figures, for one run, several and none."""

import sys
from pathlib import Path

import pytest

from simulator import plot
from simulator.record import Series
from simulator.report import report_of
from simulator.setup import Setup
from tests.simulator.reports import a_report

PNG = b"\x89PNG\r\n\x1a\n"


def test_several_runs_are_drawn_beside_each_other(tmp_path: Path) -> None:
    reports = {"baseline": a_report(5), "a rule with a long name": a_report(10)}
    drawn = plot.draw_runs(reports, tmp_path / "new")
    assert [path.name for path in drawn] == [
        "latency.png",
        "load.png",
        "refusals.png",
        "figures.png",
        "copies.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


def test_equal_figures_give_equal_files(tmp_path: Path) -> None:
    first, second = (plot.draw_loads({"run": a_report()}, tmp_path / name) for name in ("1.png", "2.png"))
    assert first.read_bytes() == second.read_bytes()


def test_a_run_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    drawn = plot.draw_runs({"nothing": report_of(Setup(), [], Series())}, tmp_path)
    assert [path.name for path in drawn] == ["latency.png", "load.png", "refusals.png"]


def test_bars_and_lines_of_an_experiment(tmp_path: Path) -> None:
    bars = plot.draw_bars({"random": 19.65, "global": 3.07}, "mean TTFT (s)", "Placement", tmp_path / "bars.png")
    points = {f"policy {n}": ([1, 2, 4], [n, 2.0 * n, 3.0 * n]) for n in range(12)}
    lines = plot.draw_lines(points, ("speed", "refused (%)"), "By speed", tmp_path / "lines.png", logarithmic=True)
    assert bars.read_bytes().startswith(PNG)
    assert lines.read_bytes().startswith(PNG)


def test_without_matplotlib_one_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(plot.NoMatplotlib, match="pip install 'dango-serve\\[sim\\]'"):
        plot.draw_loads({"run": a_report()}, tmp_path / "load.png")
