"""Figures as text. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of a report, as a column of a table."""

    heading: str
    text: Callable[[Report], str]


def _count(name: str) -> Callable[[Report], str]:
    return lambda report: f"{report['summary'][name]:,}"


def _seconds(name: str, figure: str, digits: int) -> Callable[[Report], str]:
    return lambda report: f"{report['summary'][name][figure]:.{digits}f}"


COLUMNS = (
    Column("refused", _count("refused")),
    Column("%", lambda report: f"{100 * report['summary']['refused_share']:.1f}"),
    Column("mean refused", lambda report: f"{report['summary']['refused_mean_tokens']:,.0f}"),
    Column("missed", _count("missed")),
    Column("within", _count("within")),
    Column("served Mtok", lambda report: f"{report['summary']['served_tokens'] / 1e6:.1f}"),
    Column("goodput/s", lambda report: f"{report['summary']['goodput']:.2f}"),
    Column("wasted %", lambda report: f"{100 * report['summary']['wasted_share']:.1f}"),
    Column("hit", lambda report: f"{report['summary']['hit_rate']:.3f}"),
    Column("TTFT s", _seconds("ttft_s", "mean", 2)),
    Column("p90", _seconds("ttft_s", "p90", 2)),
    Column("p99", _seconds("ttft_s", "p99", 2)),
    Column("TBT s", _seconds("tbt_s", "mean", 3)),
    Column("p99", _seconds("tbt_s", "p99", 3)),
    Column("S", lambda report: f"{report['swing']:.3f}"),
)
"""What one line says of a run."""

LEGEND = """\
mean refused: tokens of a refused prompt. missed: accepted, then failed or over a limit. within: served within both
limits; served Mtok are their prompts and answers, goodput/s how many a second. wasted: share of the prefill time
whose request was not served. hit: share of prompt tokens not computed. TBT: mean of a request's longest tenth of
token gaps. S: swing of the prefill pool's load."""
"""What the headings mean, to print under a table."""


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be: the first one to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(_line(cells, widths) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((first, *others)).rstrip()


def comparison(reports: Mapping[str, Report], columns: Sequence[Column] = COLUMNS, name: str = "run") -> str:
    """One line a run."""
    rows = [[label, *(column.text(report) for column in columns)] for label, report in reports.items()]
    return text_table([name, *(column.heading for column in columns)], rows)


def by_length(reports: Mapping[str, Report], figure: str, name: str) -> str:
    """A figure of the summary that is told by length of prompt, one line a run."""
    lengths = list(next(iter(reports.values()))["summary"][figure]) if reports else []
    rows = [
        [label, *(f"{report['summary'][figure][length]:,.6g}" for length in lengths)]
        for label, report in reports.items()
    ]
    return text_table([name, *lengths], rows)


def described(report: Report) -> str:
    """All figures of one run, one a line."""
    rows: list[list[str]] = []
    for name, value in report["summary"].items():
        if isinstance(value, Mapping):
            told = "  ".join(f"{key} {_figure(part)}" for key, part in value.items())
        else:
            told = _figure(value)
        rows.append([name, told])
    rows.append(["swing", _figure(report["swing"])])
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {told}" for name, told in rows)


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
