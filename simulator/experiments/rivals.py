"""The same nodes, split into prefill and decode or each doing both: which carries more within the limits?

Dango's services run on virtual time at several splits; the rival is `simulator.rivals.colocated` at several token
budgets. Neither side refuses by a limit for the time between tokens, so these limits do not change a run, and one
run tells the share of requests within each. All requests count: one that was refused or failed is not within.

The best splits are sought on the front of a trace, and then measured on the whole of it. The rival is fast enough
to be measured on the whole at every budget.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conductor.ask import Limits
from simulator import plot
from simulator.parallel import Tell, in_order
from simulator.record import Outcome
from simulator.rivals.colocated import Colocated, simulate_colocated
from simulator.rivals.search import Points, capacity, searched
from simulator.setup import Setup
from simulator.table import text_table
from simulator.workload import TRACES

ABOUT = "the same nodes, disaggregated at its best split against co-located at its best token budget"

NODES = 16
PREFILLS = (8, 10, 12, 13, 14, 15)
"""Prefill nodes of the splits; the others decode."""
BUDGETS = (256, 384, 512, 768, 1024, 2048)
"""Tokens of one step of the rival. The best one moves with the limit, from 256 to 1,024: there they are closer."""
TBT_LIMITS_S = (0.1, 0.2, 0.3)
TTFT_LIMIT_S = 30.0
"""All four as the FAST 2025 paper of Mooncake has them."""
ENOUGH = 0.9
"""Of all requests must be within both limits: its effective capacity."""
EVEN = 0.05
"""Speeds that differ by less are even: so much comes and goes with the order of ties."""
CLOSE = 0.05
"""Splits that come so close to the best on the front of a trace are measured on the whole of it: the front's
caches are cold, which favours prefill nodes."""
SLICE = 1500
"""Requests of the front."""
GUESS = 0.2
"""Speed for each prefill node, or node of the rival, at which a search begins: about what it turns out to be."""
NO_TBT_LIMIT_S = 1e6

COARSE, FINE, FAR = (1.25, 1.12), (1.08, 1.04), (1.3, 1.05)
"""Stride and precision of a search: on the front, on the whole from there, and of the rival from anywhere."""

OURS = "disaggregated"
VARIANTS: Mapping[str, Mapping[str, bool]] = {
    "overlap": {"overlap": True, "awaits": True},
    "no overlap": {"overlap": False, "awaits": True},
    "overlap, reuse of what is done": {"overlap": True, "awaits": False},
}
"""Of the rival, by the fields of Colocated that they set."""


@dataclass(frozen=True)
class Case:
    """A search of one system on one workload, to be done in a process of its own."""

    setup: Setup
    rival: Colocated | None
    """None: the services as `setup` says."""
    guess: float
    steps: tuple[float, float]

    def measure(self, speed: float) -> list[float]:
        """For each of TBT_LIMITS_S the share of requests within both limits."""
        # Imported here: a table that is only read needs no service, and no torch.
        from simulator.drive import simulate

        setup = dataclasses.replace(self.setup, speed=speed)
        if self.rival is None:
            return shares(simulate(setup).outcomes)
        return shares(simulate_colocated(self.rival, setup.arrivals()))


def shares(outcomes: Sequence[Outcome]) -> list[float]:
    """For each of TBT_LIMITS_S the share of all requests that were served within it and the TTFT limit."""
    limits = [Limits(TTFT_LIMIT_S, tbt_s) for tbt_s in TBT_LIMITS_S]
    return [sum(one.within(limit) for one in outcomes) / len(outcomes) for limit in limits]


def points_of(case: Case) -> Points:
    """All speeds that its search tried."""
    return searched(case.measure, ENOUGH, case.guess, *case.steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which traces, how much of them, and whether to refuse."""
    parser.add_argument("--trace", choices=TRACES, help="only this one (default: both)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many requests: a quick look")
    parser.add_argument(
        "--slice",
        type=int,
        default=SLICE,
        metavar="N",
        help="requests on which the best splits are sought (default: %(default)s)",
    )
    parser.add_argument(
        "--refuse",
        action="store_true",
        help="both sides refuse a request on arrival if its predicted TTFT is over the limit (default: none is)",
    )


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Searches on the front, on the whole, and the rival's; then the best of each."""
    names = [args.trace] if args.trace else list(TRACES)
    setups = {name: _base(name, args.limit, args.refuse) for name in names}
    front = _front(setups, min(args.slice, args.limit or args.slice), args.jobs, tell)
    whole = _whole(setups, front, args.jobs, tell)
    rivals = _rivals(setups, args.refuse, args.jobs, tell)
    return {
        "nodes": NODES,
        "enough": ENOUGH,
        "ttft_limit_s": TTFT_LIMIT_S,
        "tbt_limits_s": list(TBT_LIMITS_S),
        "refuse": args.refuse,
        "front": front,
        "systems": whole + rivals,
        "best": [
            verdict(trace, place, variant, whole, rivals)
            for trace in names
            for place in range(len(TBT_LIMITS_S))
            for variant in VARIANTS
        ],
    }


def _base(trace: str, limit: int | None, refuse: bool) -> Setup:
    """Without a TBT limit `early` refuses by the predicted TTFT alone."""
    return Setup(
        trace=trace,
        limit=limit,
        admission="early" if refuse else "none",
        reserve=False,
        hold=False,
        ttft_limit_s=TTFT_LIMIT_S,
        tbt_limit_s=NO_TBT_LIMIT_S,
    )


def _split(setup: Setup, prefills: int) -> Setup:
    return dataclasses.replace(setup, prefill=prefills, decode=NODES - prefills)


def _front(setups: Mapping[str, Setup], limit: int, jobs: int, tell: Tell) -> list[dict[str, Any]]:
    """Every split on the first requests of each trace."""
    cases = {
        (trace, OURS, prefills): Case(
            _split(dataclasses.replace(setup, limit=limit), prefills), None, GUESS * prefills, COARSE
        )
        for trace, setup in setups.items()
        for prefills in PREFILLS
    }
    return _systems(cases, f" (first {limit:,})", jobs, tell)


def _whole(
    setups: Mapping[str, Setup], front: Sequence[Mapping[str, Any]], jobs: int, tell: Tell
) -> list[dict[str, Any]]:
    """The splits that were best, or close to it, on the whole traces; the slow ones begin first."""
    cases = {
        (trace, OURS, one["size"]): Case(_split(setup, one["size"]), None, max(one["speeds"]), FINE)
        for trace, setup in setups.items()
        for one in close([one for one in front if one["trace"] == trace])
    }
    return _systems(cases, "", jobs, tell)


def close(systems: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are best at some limit, or within CLOSE of it."""
    best = [max(one["speeds"][place] for one in systems) for place in range(len(TBT_LIMITS_S))]
    return [
        one
        for one in systems
        if any(0 < most * (1 - CLOSE) <= speed for speed, most in zip(one["speeds"], best, strict=True))
    ]


def _rivals(setups: Mapping[str, Setup], refuse: bool, jobs: int, tell: Tell) -> list[dict[str, Any]]:
    """Every variant and budget of the rival on the whole traces."""
    cases = {
        (trace, variant, budget): Case(
            setup,
            Colocated(
                setup.cost(),
                NODES,
                budget,
                segment_tokens=setup.segment_tokens,
                refuse_s=TTFT_LIMIT_S if refuse else math.inf,
                **fields,
            ),
            GUESS * NODES,
            FAR,
        )
        for trace, setup in setups.items()
        for variant, fields in VARIANTS.items()
        for budget in BUDGETS
    }
    return _systems(cases, "", jobs, tell)


def _systems(cases: Mapping[tuple[str, str, int], Case], told: str, jobs: int, tell: Tell) -> list[dict[str, Any]]:
    """The cases measured: trace, kind, size (prefill nodes or budget), points, and for each limit the speed."""
    named = {f"{trace}{told}, {kind} {_told(kind, size)}": case for (trace, kind, size), case in cases.items()}
    found = in_order(points_of, named, jobs, tell)
    return [
        {
            "trace": trace,
            "kind": kind,
            "size": size,
            "speeds": [capacity(points, place, ENOUGH) for place in range(len(TBT_LIMITS_S))],
            "points": [[speed, *within] for speed, within in points.items()],
        }
        for (trace, kind, size), points in zip(cases, found, strict=True)
    ]


def verdict(
    trace: str, place: int, variant: str, ours: Iterable[Mapping[str, Any]], rivals: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The best of both sides at one limit, and how many times as much ours carries (None: the rival nothing)."""

    def best(systems: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
        able = [one for one in systems if (one["trace"], one["kind"]) == (trace, kind)]
        return max(able, key=lambda one: (one["speeds"][place], -one["size"]))

    mine, theirs = best(ours, OURS), best(rivals, variant)
    speed, other = mine["speeds"][place], theirs["speeds"][place]
    return {
        "trace": trace,
        "tbt_limit_s": TBT_LIMITS_S[place],
        "variant": variant,
        "prefills": mine["size"],
        "speed": speed,
        "budget": theirs["size"],
        "rival_speed": other,
        "ratio": speed / other if other else None,
        "wins": _winner(speed, other),
    }


def _winner(speed: float, other: float) -> str:
    if abs(speed - other) < EVEN * max(speed, other):
        return "even"
    return OURS if speed > other else "co-located"


def _told(kind: str, size: int) -> str:
    return f"{size}+{NODES - size}" if kind == OURS else f"budget {size:,}"


def table(report: dict[str, Any]) -> str:
    """Who wins at each limit, and the speeds of all that was measured."""
    return "\n\n".join((_verdicts(report), _speeds(report), _sentences(report)))


def _verdicts(report: Mapping[str, Any]) -> str:
    rows = [
        [
            one["trace"],
            f"{1000 * one['tbt_limit_s']:g} ms",
            _told(OURS, one["prefills"]),
            f"{one['speed']:.2f}",
            one["variant"],
            f"{one['budget']:,}",
            f"{one['rival_speed']:.2f}",
            "-" if one["ratio"] is None else f"{one['ratio']:.2f}",
            one["wins"],
        ]
        for one in report["best"]
    ]
    return text_table(["trace", "TBT", "split", "speed", "co-located", "budget", "speed", "ratio", "more"], rows)


def _speeds(report: Mapping[str, Any]) -> str:
    limits = [f"{1000 * limit_s:g} ms" for limit_s in report["tbt_limits_s"]]
    rows = [
        [f"{one['trace']}{told}, {one['kind']}", _told(one["kind"], one["size"]), *_each(one["speeds"])]
        for told, systems in ((" (front)", report["front"]), ("", report["systems"]))
        for one in systems
    ]
    return text_table(["system", "size", *limits], rows)


def _each(speeds: Iterable[float]) -> list[str]:
    return [f"{speed:.2f}" if speed else "none" for speed in speeds]


def _sentences(report: Mapping[str, Any]) -> str:
    told = "refuse what would miss its TTFT" if report["refuse"] else "refuse nothing"
    return (
        f"speed: of the trace, at which {100 * report['enough']:g} % of all requests are served within a TTFT of "
        f"{report['ttft_limit_s']:g} s\nand the TBT limit (mean of the longest tenth of gaps), on "
        f"{report['nodes']} nodes; both sides {told}.\nmore: who carries more; even is within {100 * EVEN:g} %."
    )


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Share within both limits over speed: a panel for each trace and limit, with the best of each system."""
    panels: dict[str, plot.Lines] = {}
    limits = report["tbt_limits_s"]
    for one in report["best"]:
        place = limits.index(one["tbt_limit_s"])
        lines = panels.setdefault(f"{one['trace']}, TBT {1000 * one['tbt_limit_s']:g} ms", {})
        lines[OURS] = _line(report, one["trace"], OURS, one["prefills"], place)
        lines[f"co-located, {one['variant']}"] = _line(report, one["trace"], one["variant"], one["budget"], place)
    labels = ("speed of the trace", "share within both limits")
    title = f"{report['nodes']} nodes, each system at its best split or token budget"
    path = folder / "rivals.png"
    return [plot.draw_panels(panels, labels, title, path, columns=len(limits), level=report["enough"])]


def _line(
    report: Mapping[str, Any], trace: str, kind: str, size: int, place: int
) -> tuple[list[float], list[float]]:
    wanted = (trace, kind, size)
    points = next(one["points"] for one in report["systems"] if (one["trace"], one["kind"], one["size"]) == wanted)
    return [point[0] for point in points], [point[1 + place] for point in points]
