"""Refusals under overload: every admission policy, in regimes in which decode binds, with two controls.

A count of refusals is biased by size: a test of what fits refuses long prompts first, and one long prompt makes
room for ten short ones. So each regime also runs with a size-blind test, and with prompts of one length.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator import plot
from simulator.parallel import Tell, simulate_all
from simulator.setup import Setup
from simulator.table import LEGEND, by_length, comparison

ABOUT = "refusals, served tokens and waste of every admission policy, where decode binds"

REGIMES: Mapping[str, dict[str, Any]] = {
    "8+1 at 1.5x": {"decode": 1, "speed": 1.5},
    "12+1 at 2x": {"prefill": 12, "decode": 1, "speed": 2.0},
    "16+1 at 3x": {"prefill": 16, "decode": 1, "speed": 3.0},
    "8+1 at 1.5x, TBT 50 ms": {"decode": 1, "speed": 1.5, "tbt_limit_s": 0.05},
    "8+8 at 1.5x, outputs x10": {"decode": 8, "speed": 1.5, "outputs_times": 10.0},
}
"""Prefill + decode instances, and how fast the conversation trace is replayed."""

CONTROLS: Mapping[str, dict[str, Any]] = {
    "as traced": {},
    "size-blind": {"size_blind": True},
    "equal prompts": {"equal_prompts": 12_000, "equal_share": True},
}

PLAIN = {"reserve": False, "hold": False}
POLICIES: Mapping[str, dict[str, Any]] = {
    "none": {"admission": "none", **PLAIN},
    "at_decode": {"admission": "at_decode", **PLAIN},
    "early": {"admission": "early", **PLAIN},
    "predictive": {"admission": "predictive", **PLAIN},
    "survival": {"admission": "survival", **PLAIN},
    "survival+reserve": {"admission": "survival", "reserve": True, "hold": False},
    "survival+hold": {"admission": "survival", "reserve": False, "hold": True},
    "default": {},
}
"""The last is what is shipped: survival, reserve and hold."""

BASELINE, DEFAULT = "at_decode", "default"
ORDER = (BASELINE, "early", "predictive")
"""The Mooncake report's order: 4,183, 3,771 and 3,589 refused."""

MODERATE, DEEP = 0.05, 0.15
"""Shares that the baseline refuses: from the first to the second is moderate overload, beyond it deep."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which of them, and how much of the trace."""
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES), help="default: all")
    parser.add_argument("--controls", nargs="+", choices=CONTROLS, default=list(CONTROLS), help="default: all")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: all")
    parser.add_argument("--limit", type=int, help="only so many requests of the trace")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Every policy in every control of every regime. Raises BadSetup."""
    setups = {
        f"{regime} / {control} / {policy}": Setup(
            **{**REGIMES[regime], **CONTROLS[control], **POLICIES[policy], "limit": args.limit, "seed": args.seed}
        )
        for regime in args.regimes
        for control in args.controls
        for policy in args.policies
    }
    return {"runs": simulate_all(setups, args.jobs, tell)}


def table(report: dict[str, Any]) -> str:
    """A table for each regime and control, and what it says."""
    parts = []
    for scene, runs in _scenes(report).items():
        parts += [
            f"{scene}\n",
            comparison(runs, name="policy"),
            "\nlongest hold, s, by length of prompt\n" + by_length(runs, "longest_hold_s", "policy"),
            "\nrefused, by length of prompt\n" + by_length(runs, "refused_by_length", "policy"),
            "\n" + "\n".join(verdicts(runs)) + "\n",
        ]
    return "\n".join([*parts, LEGEND])


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Loads, refusals and waste over time, for each regime and control."""
    return [
        path
        for scene, runs in _scenes(report).items()
        for path in plot.draw_runs(runs, folder / scene.replace(" / ", "-").replace(" ", "_").replace(",", ""))
    ]


def verdicts(runs: Mapping[str, Any]) -> list[str]:
    """What one regime says: the report's order, and the default against the baseline."""
    said = []
    if all(policy in runs for policy in ORDER):
        refused = [runs[policy]["summary"]["refused"] for policy in ORDER]
        comes = "comes out" if refused[0] > refused[1] > refused[2] else "does not come out"
        said.append(f"The report's order, {' > '.join(ORDER)}, {comes}: {', '.join(map(str, refused))}.")
    if BASELINE in runs and DEFAULT in runs:
        said.append(_against(runs[BASELINE]["summary"], runs[DEFAULT]["summary"]))
    return said


def _against(base: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    share = base["refused_share"]
    depth = "deep" if share > DEEP else "moderate" if share >= MODERATE else "little"
    less = 1 - ours["refused"] / base["refused"] if base["refused"] else 0.0
    served = ours["served_tokens"] / base["served_tokens"] if base["served_tokens"] else float("inf")
    return (
        f"{depth.capitalize()} overload, the baseline refuses {100 * share:.1f} %. The default refuses "
        f"{100 * less:.0f} % fewer, serves {served:.2f} times the tokens within both limits, wastes "
        f"{100 * ours['wasted_share']:.2f} % of prefill (baseline {100 * base['wasted_share']:.1f} %), and "
        f"{ours['missed']} accepted requests miss a limit (baseline {base['missed']})."
    )


def _scenes(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Runs by regime and control, then by policy."""
    scenes: dict[str, dict[str, Any]] = {}
    for label, one in report["runs"].items():
        scene, policy = label.rsplit(" / ", 1)
        scenes.setdefault(scene, {})[policy] = one
    return scenes
