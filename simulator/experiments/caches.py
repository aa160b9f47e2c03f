"""One cache of all nodes against a cache a node (Figure 10 of FAST 2025), and how hot blocks spread (Figure 11).

Answers have one token, so nothing but prefill is measured. How much a global cache gains depends on the router
that local ones have: one that sends a prompt to where its prefix is, or a blind one. So both are here.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator import plot
from simulator.hitrates import ideal_hit_rate
from simulator.parallel import Tell, in_order, simulate_all
from simulator.report import Report
from simulator.setup import Setup
from simulator.table import text_table
from simulator.workload import TRACES

ABOUT = "hit rate and prefill time of one global cache against local ones, and copies of hot blocks over time"

GLOBAL = "global_cache_aware"
LOCAL: Mapping[str, str] = {
    "local_cache_aware": "the router knows what each node has",
    "load_balance": "the router knows queues, and nothing of caches",
    "random": "the router knows nothing",
}
"""Rivals that use no node's cache but the own, and what their router knows."""

SPEED = 1.0
"""Ten nodes are then busy for a third of the time or a little more: caches decide, not queues."""

COPY_SPEEDS = (0.5, 1.0, 2.0, 2.5)
"""From an idle pool to one with queues; `SPEED` is among them."""

GOAL = 0.98
"""Global's hit rate is at least this share of that of one ideal pool."""

HOT = (1, 10, 100)
"""Copies are told as the mean over so many of the hottest blocks."""

KEEP = 10
"""Every tenth sample of copies goes into the report: they are looked up no more often."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of what, and how much of it."""
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES), help="default: both")
    parser.add_argument("--speed", type=float, default=SPEED, help="of the comparison (default: %(default)s)")
    parser.add_argument(
        "--copy-speeds",
        nargs="*",
        type=float,
        default=list(COPY_SPEEDS),
        help="of the copies (default: %(default)s)",
    )
    parser.add_argument("--prefill", type=int, default=10, help="prefill instances (default: %(default)s)")
    parser.add_argument(
        "--segment-tokens", type=int, default=3_000_000, help="tokens of each one's cache (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, help="only so many requests of each trace")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """By trace: the ideal rate, a run for each placement, and one for each speed with copies. Raises BadSetup."""
    setups = {}
    for trace in args.traces:
        for placement in (GLOBAL, *LOCAL):
            setups[f"{trace} / {placement}"] = _setup(args, trace, args.speed, placement)
        for speed in args.copy_speeds:
            if speed != args.speed:
                setups[f"{trace} / {speed:g}x"] = _setup(args, trace, speed, GLOBAL)
    reports = simulate_all(setups, args.jobs, tell)
    bases = {trace: setups[f"{trace} / {GLOBAL}"] for trace in args.traces}
    ideals = in_order(ideal_of, bases, 1, lambda _: None)
    return {
        "traces": {
            trace: {
                "ideal": ideal,
                "runs": {name: _kept(reports[f"{trace} / {name}"]) for name in (GLOBAL, *LOCAL)},
                "copies": {
                    f"{speed:g}x": _kept(reports[f"{trace} / {GLOBAL if speed == args.speed else f'{speed:g}x'}"])
                    for speed in sorted(args.copy_speeds)
                },
            }
            for trace, ideal in zip(args.traces, ideals, strict=True)
        }
    }


def _setup(args: argparse.Namespace, trace: str, speed: float, placement: str) -> Setup:
    return Setup(
        trace=trace,
        speed=speed,
        limit=args.limit,
        output_limit=1,
        prefill=args.prefill,
        decode=1,
        segment_tokens=args.segment_tokens,
        placement=placement,
        rests_on_decode=False,
        admission="none",
        reserve=False,
        hold=False,
        copies=placement == GLOBAL,
        seed=args.seed,
    )


def ideal_of(setup: Setup) -> float:
    """The hit rate of one pool as large as all segments together."""
    return ideal_hit_rate(setup.arrivals(), setup.prefill * setup.segment_tokens)


def _kept(report: Report) -> Report:
    """What is told and drawn of a run."""
    series = report["series"]
    kept = {name: series[name][::KEEP] for name in ("at_s", "copies")}
    return {"setup": report["setup"], "summary": report["summary"], "series": {"every_s": KEEP, **kept}}


def table(report: dict[str, Any]) -> str:
    """Two tables for each trace, and what they say."""
    parts = []
    for trace, found in report["traces"].items():
        parts += [f"{trace}: hit rate of one ideal pool {found['ideal']:.4f}", "", _rates(found), ""]
        if found["copies"]:
            parts += [_spread(found["copies"]), ""]
        parts += [*notes(trace, found), ""]
    return "\n".join(parts[:-1])


def _rates(found: Mapping[str, Any]) -> str:
    most = found["runs"][GLOBAL]["summary"]
    rows = []
    for placement, one in found["runs"].items():
        summary = one["summary"]
        rows.append(
            [
                placement,
                f"{summary['hit_rate']:.4f}",
                f"{_ratio(summary['hit_rate'], found['ideal']):.3f}",
                f"{_ratio(most['hit_rate'], summary['hit_rate']):.2f}",
                f"{summary['prefill_s']:,.0f}",
                f"{100 * (1 - _ratio(most['prefill_s'], summary['prefill_s'])):.1f}",
                f"{summary['ttft_s']['mean']:.2f}",
            ]
        )
    headings = ["placement", "hit rate", "/ ideal", "global /", "prefill s", "global saves %", "mean TTFT s"]
    return text_table(headings, rows)


def _spread(runs: Mapping[str, Report]) -> str:
    rows = []
    for speed, one in runs.items():
        last = one["series"]["copies"][-1]
        rows.append(
            [
                speed,
                *(f"{_mean(last[:hot]):.1f}" for hot in HOT),
                f"{max(last, default=0)}",
                f"{highest_mean(one):.1f}",
                f"{one['summary']['hit_rate']:.4f}",
                f"{one['summary']['ttft_s']['mean']:.2f}",
            ]
        )
    hottest = (f"hottest {hot}" if hot > 1 else "the hottest" for hot in HOT)
    return text_table(
        ["copies at the end, speed", *hottest, "most", f"peak of {HOT[-1]}", "hit rate", "TTFT s"], rows
    )


def highest_mean(report: Report) -> float:
    """The most copies that the hottest blocks had in the mean at any moment."""
    return max(map(_mean, report["series"]["copies"]), default=0.0)


def notes(trace: str, found: Mapping[str, Any]) -> list[str]:
    """What came out, in a sentence each."""
    most = found["runs"][GLOBAL]["summary"]
    share = _ratio(most["hit_rate"], found["ideal"])
    told = [
        f"{trace}: global finds {100 * share:.1f} % of what one ideal pool would; the goal of {GOAL:.0%} is "
        f"{'reached' if share >= GOAL else 'missed'}."
    ]
    for placement, knows in LOCAL.items():
        summary = found["runs"][placement]["summary"]
        times = _ratio(most["hit_rate"], summary["hit_rate"])
        less = 1 - _ratio(most["prefill_s"], summary["prefill_s"])
        told.append(
            f"Against {placement} ({knows}): {times:.2f} times the hit rate, "
            f"{100 * less:.1f} % less prefill computation."
        )
    told.append("The paper: up to 2.36 times the hit rate and 48 % less; it does not say what its router knew.")
    peaks = {speed: highest_mean(one) for speed, one in found["copies"].items()}
    if peaks:
        listed = ", ".join(f"{peak:.1f} at {speed}" for speed, peak in peaks.items())
        told.append(f"The hottest {HOT[-1]} blocks are on at most {listed} of the nodes, in the mean over them.")
    return told


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Hit rate and prefill time by placement; copies over time, and over load."""
    paths = []
    for trace, found in report["traces"].items():
        rates = {name: one["summary"]["hit_rate"] for name, one in found["runs"].items()}
        times = {name: one["summary"]["prefill_s"] for name, one in found["runs"].items()}
        bars = {"one ideal pool": found["ideal"], **rates}
        paths += [
            plot.draw_bars(bars, "hit rate", f"Hit rate, {trace} trace", folder / f"hits-{trace}.png"),
            plot.draw_bars(
                times, "seconds", f"Prefill computation, {trace} trace", folder / f"prefill-{trace}.png"
            ),
        ]
        if found["copies"]:
            paths.append(plot.draw_copies(found["copies"], folder / f"copies-{trace}.png"))
    lines = {
        trace: (
            [float(speed[:-1]) for speed in found["copies"]],
            list(map(highest_mean, found["copies"].values())),
        )
        for trace, found in report["traces"].items()
        if found["copies"]
    }
    if lines:
        labels = "speed of the trace", f"copies of the hottest {HOT[-1]}, highest mean"
        paths.append(plot.draw_lines(lines, labels, "Copies grow with load", folder / "copies-by-load.png"))
    return paths
