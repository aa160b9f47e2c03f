"""What came out: medians with their spread, against what, within which limit; as a table and as JSON. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Several samples of one number."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(samples: Sequence[float]) -> "Spread":
        """Of at least one sample."""
        return Spread(statistics.median(samples), min(samples), max(samples), len(samples))

    def text(self) -> str:
        """The median, and from where to where."""
        if self.count == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


@dataclass(frozen=True)
class Row:
    """One measured thing. `limit` bounds the ratio of the medians, or the median where nothing is compared."""

    name: str
    unit: str
    measured: Spread
    against: Spread | None = None
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured by what it is compared with."""
        return None if self.against is None else self.measured.median / self.against.median

    @property
    def within(self) -> bool | None:
        """Whether the limit holds; None without one."""
        if self.limit is None:
            return None
        return (self.measured.median if self.ratio is None else self.ratio) <= self.limit

    def cells(self) -> list[str]:
        """As shown, in the order of HEADINGS."""
        return [
            self.name,
            self.unit,
            self.measured.text(),
            "" if self.against is None else self.against.text(),
            "" if self.ratio is None else f"{self.ratio:.3f}",
            "" if self.limit is None else f"<= {number(self.limit)}",
            {None: "", True: "met", False: "MISSED"}[self.within],
        ]

    def body(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "measured": vars(self.measured),
            "against": None if self.against is None else vars(self.against),
            "ratio": self.ratio,
            "limit": self.limit,
            "within": self.within,
        }


HEADINGS = ["what", "unit", "median (min-max)", "against", "ratio", "limit", ""]


def table(rows: Sequence[Row]) -> str:
    """Rows under HEADINGS, in columns."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def facts(about: Mapping[str, Any]) -> str:
    """Where and how it was measured, one fact a line."""
    width = max(map(len, about), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in about.items())


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of all do not exceed (nearest rank)."""
    assert samples
    assert 0 < percent <= 100
    ordered = sorted(samples)
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1]


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"
