"""Which placement gives the first token soonest? The four of them at several speeds (Figure 5 of FAST 2025).

Nothing is refused, so that all serve the same requests: what is too slow for a speed shows in its queues. Every
prompt goes through prefill, as in the paper.
"""

import argparse
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from conductor.place import PLACEMENTS
from simulator import plot
from simulator.parallel import Tell, simulate_all
from simulator.setup import Setup
from simulator.table import text_table
from simulator.workload import TRACES

ABOUT = "time to first token of the four placements at several speeds, beside the paper's"

PAPER_S: Mapping[str, float] = {
    "random": 19.65,
    "load_balance": 5.27,
    "local_cache_aware": 3.58,
    "global_cache_aware": 3.07,
}
"""Mean TTFT in Mooncake's FAST 2025 paper, Figure 5: 16 nodes of 8xA800, conversation trace, slowest first. No one
speed gives all four, so what is held against them are the order and the ratios."""

BEST, LOCAL = "global_cache_aware", "local_cache_aware"

SPEEDS = (1.0, 1.5, 1.8, 2.0)
"""From a prefill pool that is half idle to one that is nearly full."""

GOAL = 0.12
"""The mean of global is below that of local by at least this share; the paper has 0.14."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of what, and how much of it."""
    parser.add_argument("--trace", choices=TRACES, default="conversation", help="default: %(default)s")
    parser.add_argument("--speeds", nargs="+", type=float, default=list(SPEEDS), help="default: %(default)s")
    parser.add_argument("--prefill", type=int, default=8, help="prefill instances (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=8, help="decode instances (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="only so many requests of the trace")
    parser.add_argument(
        "--output-limit",
        type=int,
        help="cut answers to so many tokens: the run is shorter, prefill hardly changes",
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Each placement at each speed. Raises BadSetup."""
    setups = {
        f"{speed:g}x / {placement}": Setup(
            trace=args.trace,
            speed=speed,
            limit=args.limit,
            output_limit=args.output_limit,
            prefill=args.prefill,
            decode=args.decode,
            placement=placement,
            rests_on_decode=False,
            admission="none",
            reserve=False,
            hold=False,
            seed=args.seed,
        )
        for speed in args.speeds
        for placement in PAPER_S
    }
    return {"runs": simulate_all(setups, args.jobs, tell)}


def table(report: dict[str, Any]) -> str:
    """A line a run, and what each speed says."""
    rows = []
    for speed, runs in by_speed(report).items():
        for placement, one in runs.items():
            ttft, times = one["summary"]["ttft_s"], PAPER_S[placement] / PAPER_S[BEST]
            mean = _mean(one)
            rows.append(
                [
                    f"{speed} {placement}",
                    f"{mean:.2f}",
                    f"{ttft['p90']:.2f}",
                    f"{ttft['p99']:.2f}",
                    f"{mean / _mean(runs[BEST]):.2f}",
                    f"{times:.2f}",
                    f"{one['summary']['hit_rate']:.3f}",
                    f"{one['summary']['refused'] + one['summary']['failed']}",
                ]
            )
    headings = ["speed, placement", "mean TTFT s", "p90", "p99", "/ global", "paper's", "hit", "not served"]
    return "\n".join([text_table(headings, rows), "", *notes(report)])


def notes(report: Mapping[str, Any]) -> list[str]:
    """What came out, in a sentence each."""
    told, best = [], ("", -1.0)
    for speed, runs in by_speed(report).items():
        means = {placement: _mean(one) for placement, one in runs.items()}
        broken = [f"{slow} is not above {fast}" for slow, fast in pairwise(PAPER_S) if means[slow] <= means[fast]]
        below = 1 - means[BEST] / means[LOCAL]
        best = max(best, (speed, below), key=lambda one: one[1])
        order = (
            "the paper's order holds" if not broken else "the paper's order does not hold: " + ", ".join(broken)
        )
        told.append(f"{speed}: {order}; global is {_apart(below)} local (the paper: 14.2 % below).")
    reached = "reached" if best[1] >= GOAL else "missed"
    told.append(f"The goal of {GOAL:.0%} below local is {reached}: at best {best[1]:.1%}, at {best[0]}.")
    return told


def _apart(below: float) -> str:
    return f"{abs(below) * 100:.1f} % {'below' if below >= 0 else 'above'}"


def _mean(report: Mapping[str, Any]) -> float:
    return float(report["summary"]["ttft_s"]["mean"])


def by_speed(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs of each speed, by placement."""
    speeds: dict[str, dict[str, Any]] = {}
    for label, one in report["runs"].items():
        speed, placement = label.split(" / ")
        speeds.setdefault(speed, {})[placement] = one
    return speeds


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Mean TTFT over speed; ratios beside the paper's; distributions at the highest speed."""
    speeds = by_speed(report)
    lines = {
        placement: ([float(speed[:-1]) for speed in speeds], [_mean(runs[placement]) for runs in speeds.values()])
        for placement in PAPER_S
    }
    fastest, runs = list(speeds.items())[-1]
    ratios = {}
    for placement, one in runs.items():
        ratios[f"{placement}, {fastest}"] = _mean(one) / _mean(runs[BEST])
        ratios[f"{placement}, paper"] = PAPER_S[placement] / PAPER_S[BEST]
    return [
        plot.draw_lines(
            lines, ("speed of the trace", "mean TTFT (s)"), "Time to first token", folder / "ttft.png"
        ),
        plot.draw_bars(ratios, "mean TTFT / that of global", "Beside the paper", folder / "ratios.png"),
        plot.draw_distributions(runs, folder / "latency.png"),
    ]


assert PAPER_S.keys() == PLACEMENTS.keys(), "each placement has its figure"
