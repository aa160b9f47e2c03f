"""A report is JSON, and its distributions run from the least to the most."""

import json

import pytest

from simulator.record import Series
from simulator.report import QUANTILES, report_of
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


def test_a_run_of_nothing_is_a_report_too() -> None:
    report = report_of(Setup(), [], Series())
    assert report["quantiles"] == {"ttft_s": [], "tbt_s": []}
    json.dumps(report, allow_nan=False)
