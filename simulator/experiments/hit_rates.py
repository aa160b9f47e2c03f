"""How much of the public traces one cache of a given size can serve again, found with the shipped index."""

import argparse
from pathlib import Path
from typing import Any

from simulator import plot
from simulator.hitrates import hit_rate
from simulator.parallel import Tell, in_order
from simulator.table import text_table
from simulator.workload import TRACES, load_trace

ABOUT = "hit rates of the index on both public traces, by capacity, beside the known ones"

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, None)
"""In blocks of 512 tokens; None is without bound."""

KNOWN = {
    "conversation": (0.045, 0.212, 0.326, 0.355, 0.364, 0.366),
    "synthetic": (0.084, 0.424, 0.624, 0.640, 0.640, 0.640),
}
"""Of one LRU cache, by an independent script: blocks found as part of an unbroken prefix, all blocks counted.
A request's blocks are counted from the front to the first miss, then all refreshed from the last to the first."""

TOLERANCE = 0.001
"""The known ones have three digits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which trace."""
    parser.add_argument("--trace", choices=TRACES, help="only this one (default: both)")


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """For each trace and capacity the rate and the known one."""
    names = [args.trace] if args.trace else TRACES
    cases = {f"{name}, {_told(size)} blocks": (name, size) for name in names for size in CAPACITIES}
    rates = dict(zip(cases.values(), in_order(rate_of, cases, args.jobs, tell), strict=True))
    return {"traces": {name: [_row(name, size, rates[name, size]) for size in CAPACITIES] for name in names}}


def rate_of(case: tuple[str, int | None]) -> float:
    """The hit rate of a trace at a capacity in blocks."""
    name, capacity = case
    return hit_rate([arrival.blocks for arrival in load_trace(name)], capacity)


def _row(name: str, capacity: int | None, rate: float) -> dict[str, Any]:
    known = KNOWN[name][CAPACITIES.index(capacity)]
    return {"capacity": capacity, "rate": rate, "known": known, "agrees": abs(rate - known) <= TOLERANCE}


def table(report: dict[str, Any]) -> str:
    """One line for each trace and capacity."""
    rows = [
        [
            name,
            _told(row["capacity"]),
            f"{row['rate']:.4f}",
            f"{row['known']:.3f}",
            "yes" if row["agrees"] else "NO",
        ]
        for name, listed in report["traces"].items()
        for row in listed
    ]
    return text_table(["trace", "blocks", "hit rate", "known", f"within {TOLERANCE}"], rows)


def _told(capacity: int | None) -> str:
    return "unbounded" if capacity is None else f"{capacity:,}"


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Hit rate over capacity."""
    lines = {}
    for name, rows in report["traces"].items():
        bounded = [row for row in rows if row["capacity"] is not None]
        lines[name] = [row["capacity"] for row in bounded], [row["rate"] for row in bounded]
    labels = ("capacity (blocks of 512 tokens)", "hit rate")
    return [
        plot.draw_lines(lines, labels, "Hit rate of one LRU cache", folder / "hit-rates.png", logarithmic=True)
    ]
