"""One run, whatever the flags say."""

import argparse
from pathlib import Path
from typing import Any

from simulator import plot
from simulator.flags import add_setup_flags, setup_of
from simulator.parallel import Tell, simulate_all
from simulator.table import described

ABOUT = "one run, of any workload and settings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a Setup."""
    add_setup_flags(parser)


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Raises BadSetup, BadTrace, BadCostModel, or OSError."""
    return simulate_all({"run": setup_of(args)}, args.jobs, tell)["run"]


def table(report: dict[str, Any]) -> str:
    """Every figure, one a line."""
    return described(report)


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Distributions, loads, refusals, copies."""
    return plot.draw_runs({"this run": report}, folder)
