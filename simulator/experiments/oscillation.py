"""Do the pools swing? Both loads over time under three policies, where swinging exists and where it does not.

Early rejection sees the decode load of now, which follows from what was admitted one prefill ago: so the pools
fill and empty in anti-phase (Mooncake report). S is the standard deviation of the prefill pool's load after taking
away its moving mean over 120 s.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator import plot
from simulator.parallel import Tell, simulate_all
from simulator.setup import Setup
from simulator.table import LEGEND, comparison

ABOUT = "both pools' load over 20 minutes under early, predictive and the default; S is how much it swings"

SPAN_S = 1200.0
"""20 minutes."""

SCENES: Mapping[str, dict[str, Any]] = {
    "equal 32k prompts, 8+1": {
        "equal_prompts": 32_000,
        "thinned": 0.8,
        "spread": True,
        "decode": 1,
        "tbt_limit_s": 0.05,
    },
    "plain trace, 8+8": {"speed": 1.0},
}
"""The first is where the prefill delay is about as long as decode's residence, and decode binds."""

POLICIES: Mapping[str, dict[str, Any]] = {
    "early": {"admission": "early", "reserve": False, "hold": False},
    "predictive": {"admission": "predictive", "reserve": False, "hold": False},
    "default": {},
}

GOAL = 3.0
"""S(early) is at least so many times S(default), where it swings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long, and with which dice."""
    parser.add_argument("--span", type=float, default=SPAN_S, help="seconds of the trace (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Each policy in each scene. Raises BadSetup."""
    setups = {
        f"{scene} / {policy}": Setup(**{**fields, **POLICIES[policy], "until_s": args.span, "seed": args.seed})
        for scene, fields in SCENES.items()
        for policy in POLICIES
    }
    return {"runs": simulate_all(setups, args.jobs, tell)}


def table(report: dict[str, Any]) -> str:
    """A line a run, and S against S."""
    parts = []
    for scene, runs in _scenes(report).items():
        early, predictive, default = (runs[policy]["swing"] for policy in POLICIES)
        ratio = early / default if default else float("inf")
        calmer = "no more" if default <= predictive else "more"
        parts.append(
            f"{scene}\n\n{comparison(runs, name='policy')}\n\nS(early) is {ratio:.1f} times S(default); "
            f"the default swings {calmer} than predictive ({default:.3f} against {predictive:.3f}).\n"
        )
    return "\n".join([*parts, LEGEND])


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Both pools' load over time, a picture a scene."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        plot.draw_loads(runs, folder / f"loads-{number}.png")
        for number, runs in enumerate(_scenes(report).values(), start=1)
    ]


def _scenes(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    scenes: dict[str, dict[str, Any]] = {}
    for label, one in report["runs"].items():
        scene, policy = label.rsplit(" / ", 1)
        scenes.setdefault(scene, {})[policy] = one
    return scenes
