"""How much of the public traces one cache of a given size can serve again, found with the shipped index."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcache_pool.eviction import EVICTIONS
from simulator import plot
from simulator.hitrates import hit_rate
from simulator.parallel import Tell, in_order
from simulator.table import text_table
from simulator.workload import TRACES, load_trace

ABOUT = "hit rates of the index on both public traces, by capacity, beside the known ones or LRU's rivals"

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

RULES = {**{name: (name, 1.0) for name in EVICTIONS}, "lru, watermark 0.9": ("lru", 0.9)}
"""What is compared: the order of eviction, and the share in use above which blocks go before their room is
wanted."""

LABELS = ("capacity (blocks of 512 tokens)", "hit rate")

RIVAL_CAPACITIES = CAPACITIES[:4]
"""Above these nearly everything fits, so that no rule matters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which trace."""
    parser.add_argument("--trace", choices=TRACES, help="only this one (default: both)")
    parser.add_argument("--rivals", action="store_true", help="compare the orders of eviction, and a watermark")


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """For each trace and capacity the rate and the known one; or the rate by each rule."""
    names = [args.trace] if args.trace else TRACES
    if args.rivals:
        return {"rivals": _rivals(names, args.jobs, tell)}
    cases = {f"{name}, {_told(size)} blocks": (name, size) for name in names for size in CAPACITIES}
    rates = dict(zip(cases.values(), in_order(rate_of, cases, args.jobs, tell), strict=True))
    return {"traces": {name: [_row(name, size, rates[name, size]) for size in CAPACITIES] for name in names}}


def rate_of(case: tuple[str, int | None]) -> float:
    """The hit rate of a trace at a capacity in blocks."""
    name, capacity = case
    return hit_rate([arrival.blocks for arrival in load_trace(name)], capacity)


def _rivals(names: Sequence[str], jobs: int, tell: Tell) -> dict[str, list[dict[str, Any]]]:
    cases = {
        f"{name}, {_told(size)} blocks, {rule}": (name, size, rule)
        for name in names
        for size in RIVAL_CAPACITIES
        for rule in RULES
    }
    rates = dict(zip(cases.values(), in_order(rate_by, cases, jobs, tell), strict=True))
    return {
        name: [
            {"capacity": size, "rates": {rule: rates[name, size, rule] for rule in RULES}}
            for size in RIVAL_CAPACITIES
        ]
        for name in names
    }


def rate_by(case: tuple[str, int | None, str]) -> float:
    """The hit rate of a trace at a capacity in blocks by a rule."""
    name, capacity, rule = case
    return hit_rate([arrival.blocks for arrival in load_trace(name)], capacity, *RULES[rule])


def _row(name: str, capacity: int | None, rate: float) -> dict[str, Any]:
    known = KNOWN[name][CAPACITIES.index(capacity)]
    return {"capacity": capacity, "rate": rate, "known": known, "agrees": abs(rate - known) <= TOLERANCE}


def table(report: dict[str, Any]) -> str:
    """One line for each trace and capacity."""
    if "rivals" in report:
        rows = [
            [name, _told(row["capacity"]), *(f"{rate:.4f}" for rate in row["rates"].values())]
            for name, listed in report["rivals"].items()
            for row in listed
        ]
        return text_table(["trace", "blocks", *RULES], rows)
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
    if "rivals" in report:
        for name, rows in report["rivals"].items():
            for rule in RULES:
                rates = [row["rates"][rule] for row in rows]
                lines[f"{name}, {rule}"] = [row["capacity"] for row in rows], rates
        title, path = "Hit rate by order of eviction", folder / "hit-rates-rivals.png"
        return [plot.draw_lines(lines, LABELS, title, path, logarithmic=True)]
    for name, rows in report["traces"].items():
        bounded = [row for row in rows if row["capacity"] is not None]
        lines[name] = [row["capacity"] for row in bounded], [row["rate"] for row in bounded]
    return [
        plot.draw_lines(lines, LABELS, "Hit rate of one LRU cache", folder / "hit-rates.png", logarithmic=True)
    ]
