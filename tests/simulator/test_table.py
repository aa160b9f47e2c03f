"""Tables line up, and say every figure."""

from simulator.table import COLUMNS, by_length, comparison, described, text_table
from tests.simulator.reports import a_report


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert text_table(["a", "figure"], [["long name", "1"], ["b", "22"]]).splitlines() == [
        "a          figure",
        "---------  ------",
        "long name       1",
        "b              22",
    ]


def test_a_comparison_has_a_line_a_run() -> None:
    lines = comparison({"baseline": a_report(5), "ours": a_report(10)}, name="policy").splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["policy", "refused", "%"]
    assert lines[2].split()[:3] == ["baseline", "20", "20.0"]
    assert lines[3].split()[:3] == ["ours", "10", "10.0"]
    assert all(column.text(a_report()) for column in COLUMNS)


def test_figures_by_length_have_a_column_a_class() -> None:
    lines = by_length({"ours": a_report(4)}, "refused_by_length", "refused").splitlines()
    assert lines[0].split() == ["refused", "<4k", "4-16k", "16-64k", ">64k"]
    assert lines[2].split() == ["ours", "25", "0", "0", "0"]
    assert by_length({}, "refused_by_length", "refused").splitlines()[0] == "refused"


def test_one_run_is_told_whole() -> None:
    told = dict(line.split(maxsplit=1) for line in described(a_report()).splitlines())
    assert told["requests"] == "100"
    assert told["refused_by_reason"] == "tbt 20"
    assert told["ttft_s"].startswith("mean ")
    assert told.keys() == {*a_report()["summary"], "swing"}
