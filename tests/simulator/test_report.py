"""A report is JSON, and its distributions run from the least to the most."""

import json

import pytest

from conductor.ask import Priority
from simulator.record import Outcome, Series
from simulator.report import QUANTILES, WARM_S, report_of
from simulator.setup import Setup
from tests.simulator.reports import a_report


def test_a_report_is_json_as_it_is() -> None:
    report = a_report()
    assert json.loads(json.dumps(report, allow_nan=False)) == json.loads(json.dumps(report))
    assert report["summary"]["refused"] == 20


def test_distributions_run_from_least_to_most() -> None:
    ttft = a_report()["quantiles"]["ttft_s"]
    assert len(ttft) == QUANTILES
    assert (ttft[0], ttft[-1]) == pytest.approx((1.2, 10.0))
    assert ttft == sorted(ttft)


def test_the_swing_leaves_out_how_a_run_begins_and_ends() -> None:
    outcomes = [Outcome(at_s, 100, 1, Priority.INTERACTIVE, at_s + 1) for at_s in (0.0, 150.0)]
    series = Series()
    for second in range(200):
        series.sample(second, (0.5 if WARM_S <= second < 150 else 8.0, 0.5), 1, 1, 0, 0, 0.0)
    assert series.swing() > 1
    assert report_of(Setup(), outcomes, series)["swing"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_of_nothing_is_a_report_too() -> None:
    report = report_of(Setup(), [], Series())
    assert report["quantiles"] == {"ttft_s": [], "tbt_s": []}
    json.dumps(report, allow_nan=False)
