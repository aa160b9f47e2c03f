"""Does simulation tell the truth? A recorded run of the live service, and the same requests on virtual time.

A recording holds what was sent and what came of it, the settings of the service, and a cost model of the machine
that was fitted before, from requests of their own. `python -m bench truth` makes one.
"""

import argparse
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy

from simulator import plot
from simulator.parallel import Tell, in_order
from simulator.record import Outcome
from simulator.setup import Setup
from simulator.table import text_table
from simulator.workload import BadTrace

ABOUT = "a recorded run of the live service beside a simulation of it"

SHIPPED = Path(__file__).parents[1] / "traces" / "live.json.xz"
"""The default model on two cores, as docs/results.md tells of it."""

LATENCY_WITHIN, REFUSALS_WITHIN = 0.20, 0.10
"""Shares of the live figure by which the simulated one may differ."""

POINTS = 101
"""Of a distribution, for the plot."""


@dataclass(frozen=True)
class Sent:
    """One request as it was sent, and what its client saw of it. Times in seconds, lengths in tokens."""

    at_s: float
    """From the start of its part."""
    tokens: int
    output: int
    blocks: list[int]
    """As in a trace: one id for each block of the prompt."""
    ttft_s: float | None
    """None: there was no token."""
    tpot_s: float | None
    """Mean time between tokens; None where there were fewer than two."""
    refused: str = ""
    """The reason; empty if it was served."""


@dataclass(frozen=True)
class Part:
    """One run on a service that was fresh."""

    name: str
    ttft_limit_s: float
    tbt_limit_s: float
    warm_up: int
    """So many requests at the start are not judged: caches, fits and queues fill first."""
    requests: list[Sent]
    errors: dict[str, float] = field(default_factory=dict)
    """Of the Conductor's predictions: by the metric of their ratios, the median error in per cent."""


@dataclass(frozen=True)
class Recording:
    """A live run of some parts."""

    about: dict[str, Any]
    """The machine."""
    cost: dict[str, Any]
    """Of a CostModel."""
    settings: dict[str, Any]
    """Fields of a Setup that say how the service was set."""
    parts: list[Part]

    def body(self) -> dict[str, Any]:
        """JSON-ready, as `read` takes it."""
        return asdict(self)

    @staticmethod
    def read(path: Path) -> "Recording":
        """Plain, or compressed as .xz. Raises BadTrace, or OSError."""
        try:
            body = json.loads(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes())
            parts = [
                Part(**{**part, "requests": [Sent(**sent) for sent in part["requests"]]}) for part in body["parts"]
            ]
            return Recording(**{**body, "parts": parts})
        except (ValueError, TypeError, KeyError, lzma.LZMAError) as error:
            raise BadTrace(f"{path}: not a recorded run: {error}") from error


def setups(recording: Recording, folder: Path) -> dict[str, Setup]:
    """A setup for each part; what they name is written into a folder: a cost model, and a trace for each part.

    Raises BadSetup, or OSError."""
    model = folder / "cost.json"
    model.write_text(json.dumps(recording.cost, indent=1) + "\n", encoding="utf-8")
    made = {}
    for part in recording.parts:
        trace = folder / f"{part.name}.jsonl"
        trace.write_text("".join(_line(sent) for sent in part.requests), encoding="utf-8")
        made[part.name] = Setup(
            trace=str(trace),
            model=str(model),
            ttft_limit_s=part.ttft_limit_s,
            tbt_limit_s=part.tbt_limit_s,
            **recording.settings,
        )
    return made


def _line(sent: Sent) -> str:
    row = {"timestamp": 1000 * sent.at_s, "input_length": sent.tokens, "output_length": sent.output}
    return json.dumps({**row, "hash_ids": sent.blocks}) + "\n"


def outcomes_of(setup: Setup) -> list[Outcome]:
    """What becomes of each request on virtual time."""
    from simulator.drive import simulate  # here: the services need torch, the figures do not

    return simulate(setup).outcomes


def resimulated(recording: Recording, folder: Path, jobs: int, tell: Tell) -> dict[str, Any]:
    """Every part, live beside simulated. Raises BadSetup, BadCostModel, BadTrace, or OSError."""
    try:
        made = setups(recording, folder)
    except TypeError as error:
        raise BadTrace(f"settings of the recorded run: {error}") from error
    runs = in_order(outcomes_of, made, jobs, tell)
    parts = {part.name: compared(part, outcomes) for part, outcomes in zip(recording.parts, runs, strict=True)}
    return {"about": recording.about, "cost": recording.cost, "settings": recording.settings, "parts": parts}


def compared(part: Part, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of one part: judged ones, and others to see more by."""
    live = part.requests[part.warm_up :]
    simulated = [seen_of(outcome) for outcome in outcomes[part.warm_up :]]
    ttft = [[one.ttft_s for one in side if one.ttft_s is not None] for side in (live, simulated)]
    tpot = [[one.tpot_s for one in side if one.tpot_s is not None] for side in (live, simulated)]
    refused = [sum(bool(one.refused) for one in side) for side in (live, simulated)]
    same = sum(bool(one.refused) and bool(other.refused) for one, other in zip(live, simulated, strict=True))
    return {
        "requests": len(live),
        "figures": [
            figure("median TTFT", _percentile(ttft[0], 50), _percentile(ttft[1], 50), LATENCY_WITHIN),
            figure("median TPOT", _percentile(tpot[0], 50), _percentile(tpot[1], 50), LATENCY_WITHIN),
            figure("refused", refused[0], refused[1], REFUSALS_WITHIN),
            figure("p90 TTFT", _percentile(ttft[0], 90), _percentile(ttft[1], 90)),
            figure("p90 TPOT", _percentile(tpot[0], 90), _percentile(tpot[1], 90)),
        ],
        "refused_in_both": same,
        "errors": part.errors,
        "quantiles": {"TTFT": [_quantiles(side) for side in ttft], "TPOT": [_quantiles(side) for side in tpot]},
    }


def seen_of(outcome: Outcome) -> Sent:
    """A simulated request as its client would have seen it: TPOT holds the hand-over, too."""
    ttft_s = None if outcome.first_token_s is None else outcome.ttft_s
    tpot_s = None
    if outcome.first_token_s is not None and outcome.output > 1 and outcome.finished:
        tpot_s = (outcome.end_s - outcome.first_token_s) / (outcome.output - 1)
    return Sent(outcome.at_s, outcome.tokens, outcome.output, [], ttft_s, tpot_s, outcome.refused)


def figure(name: str, live: float, simulated: float, within: float | None = None) -> dict[str, Any]:
    """One line of the table; `agrees` is None where nothing is judged."""
    agrees = None if within is None else abs(simulated - live) <= within * live
    ratio = simulated / live if live else None
    return {"name": name, "live": live, "simulated": simulated, "ratio": ratio, "within": within, "agrees": agrees}


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(numpy.percentile(values, percent)) if values else 0.0


def _quantiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in numpy.quantile(values, numpy.linspace(0, 1, POINTS))] if values else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which recording."""
    parser.add_argument(
        "--live",
        type=Path,
        metavar="FILE",
        default=SHIPPED,
        help="as `python -m bench truth --record FILE` writes; default: one of a machine of two cores",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the cost model and the traces here")


def run(args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Raises BadSetup, BadTrace, BadCostModel, or OSError."""
    recording = Recording.read(args.live)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
        return resimulated(recording, args.keep, args.jobs, tell)
    with TemporaryDirectory() as folder:
        return resimulated(recording, Path(folder), args.jobs, tell)


def table(report: dict[str, Any]) -> str:
    """One line for each figure of each part."""
    rows = [
        [part, line["name"], *_cells(line)] for part, body in report["parts"].items() for line in body["figures"]
    ]
    return text_table(["part", "figure", "live", "simulated", "ratio", "within", "agrees"], rows)


def _cells(line: Mapping[str, Any]) -> list[str]:
    count = line["name"] == "refused"
    shown = [f"{line[side]:.0f}" if count else f"{1000 * line[side]:,.1f} ms" for side in ("live", "simulated")]
    ratio = "" if line["ratio"] is None else f"{line['ratio']:.3f}"
    within = "" if line["within"] is None else f"{100 * line['within']:.0f} %"
    return [*shown, ratio, within, {None: "", True: "yes", False: "NO"}[line["agrees"]]]


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Distributions of both latencies in each part, live and simulated."""
    shares = [float(share) for share in numpy.linspace(0, 1, POINTS)]
    drawn = []
    for name in ("TTFT", "TPOT"):
        lines = {}
        for part, body in report["parts"].items():
            for side, values in zip(("live", "simulated"), body["quantiles"][name], strict=True):
                lines[f"{part}, {side}"] = (values, shares[: len(values)])
        path = folder / f"truth-{name.lower()}.png"
        labels = (f"{name} (s)", "share of requests")
        drawn.append(plot.draw_lines(lines, labels, f"{name}, live and simulated", path))
    return drawn
