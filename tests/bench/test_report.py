"""The arithmetic of reports."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report import HEADINGS, Row, Spread, facts, number, percentile, table

SAMPLES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50)


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0, 3)
    assert Spread.of([4.0, 2.0]).median == 3.0
    assert Spread.of([5.0, 1.0, 2.0]).text() == "2.00 (1.00-5.00)"
    assert Spread.of([7.0]).text() == "7.00"


@given(SAMPLES)
def test_a_median_lies_between_the_ends(samples: list[float]) -> None:
    spread = Spread.of(samples)
    assert spread.low <= spread.median <= spread.high
    assert spread.count == len(samples)


def test_percentiles_are_samples_by_nearest_rank() -> None:
    hundred = [float(n) for n in range(100, 0, -1)]
    assert [percentile(hundred, p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1.0
    assert percentile([3.0, 1.0], 99) == 3.0


@given(SAMPLES, st.floats(0.1, 100))
def test_a_percentile_is_the_least_sample_that_covers_so_many(samples: list[float], percent: float) -> None:
    value = percentile(samples, percent)
    wanted = percent / 100 * len(samples) * (1 - 1e-12)
    assert sum(sample <= value for sample in samples) >= wanted
    assert sum(sample < value for sample in samples) < percent / 100 * len(samples) + 1e-9


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0331, "0.0331"), (1.15, "1.15"), (20, "20.0"), (424.4, "424"), (9143.7, "9,144")],
)
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text
    assert number(math.inf) == "inf"


def test_a_limit_bounds_the_ratio_where_there_is_one() -> None:
    ours, alone = Spread.of([115.0]), Spread.of([100.0])
    assert Row("x", "ms", ours, alone, 1.15).within is True
    assert Row("x", "ms", ours, alone, 1.14).within is False
    assert Row("x", "ms", ours, limit=114.0).within is False
    assert Row("x", "ms", ours, limit=115.0).within is True
    assert Row("x", "ms", ours, alone).within is None


def test_a_table_has_a_line_for_each_row_in_aligned_columns() -> None:
    rows = [
        Row("TTFT, 512 tokens", "ms", Spread.of([120.0]), Spread.of([100.0]), 1.15),
        Row("cached", "tokens", Spread.of([2992.0])),
    ]
    lines = table(rows).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:2] == HEADINGS[:2]
    assert lines[1].split("  ")[-1] == "MISSED"
    assert "1.200" in lines[1]
    assert [line.index(unit) for line, unit in zip(lines, ("  unit", "  ms", "  tokens  2"), strict=True)] == [
        16
    ] * 3


def test_json_has_what_the_table_has() -> None:
    row = Row("x", "ms", Spread.of([2.0, 4.0]), Spread.of([2.0]), 1.6)
    body = json.loads(json.dumps(row.body()))
    assert body["measured"] == {"median": 3.0, "low": 2.0, "high": 4.0, "count": 2}
    assert (body["ratio"], body["limit"], body["within"]) == (1.5, 1.6, True)


def test_facts_are_one_a_line() -> None:
    assert facts({"seed": 1, "threads": 2}).splitlines() == ["seed     1", "threads  2"]
    assert facts({}) == ""
