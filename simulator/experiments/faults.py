"""Deaths, partitions and bad weather, drawn from seeds, and every truth of the service checked meanwhile."""

import argparse
from pathlib import Path
from typing import Any

from simulator.parallel import Tell, in_order

ABOUT = "what goes wrong, drawn from seeds, and whether every truth holds; replays a seed that a test names"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which seeds."""
    parser.add_argument("--seed", type=int, default=0, help="the first (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many from there on (default: %(default)s)")


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """For each seed what went wrong, how its requests ended, and what did not hold."""
    seeds = {f"seed {seed}": seed for seed in range(args.seed, args.seed + args.seeds)}
    played = in_order(play, seeds, args.jobs, tell)
    return {"seeds": played, "broken": sum(bool(one["broken"]) for one in played)}


def play(seed: int) -> dict[str, Any]:
    """One seed, JSON-ready."""
    # Imported here: whoever asks for help needs no service.
    from simulator.faults import script_of
    from simulator.trial import try_seed

    script, result = script_of(seed), try_seed(seed, record=True)
    return {
        "seed": seed,
        "weather": str(script.plan.weather),
        "faults": [str(fault) for fault in script.faults],
        "endings": dict(sorted(result.endings.items())),
        "seconds": result.seconds,
        "messages": result.messages,
        "trace": result.trace,
        "broken": result.broken,
    }


def table(report: dict[str, Any]) -> str:
    """Each broken seed, or the only one, as a story; then the sum."""
    played = report["seeds"]
    told = [_story(one) for one in played if one["broken"] or len(played) == 1]
    return "\n\n".join([*told, f"{len(played)} seeds, {report['broken']} of them broken"])


def _story(one: dict[str, Any]) -> str:
    endings = ", ".join(f"{count} {ending}" for ending, count in one["endings"].items())
    lines = [
        f"seed {one['seed']}",
        one["weather"],
        *one["faults"],
        f"{one['seconds']:.0f} s, {one['messages']} messages, trace {one['trace'][:16]}",
        f"requests: {endings}",
        *(f"BROKEN at {sentence}" for sentence in one["broken"]),
    ]
    return "\n  ".join(lines)


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """There is nothing to draw."""
    return []
