"""`dango sim`: run the real services on virtual time; print a table, and perhaps write JSON and draw plots."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from simulator.cost import BadCostModel
from simulator.experiments import caches, faults, hit_rates, oscillation, refusals, rivals, run, scheduling, truth
from simulator.parallel import Tell
from simulator.plot import NoMatplotlib, require_matplotlib
from simulator.setup import BadSetup
from simulator.workload import BadTrace

ABOUT = """\
The shipped Conductor, prefill, KVCache and decode services on virtual time: a loop that never waits, a network in
memory, and engines that take as long as a cost model says. Equal seeds give equal results.

"""

EXAMPLES = """
examples:
  dango sim run --limit 2000
  dango sim run --trace my.jsonl --speed 2 --prefill 8 --decode 2 --json run.json --plot plots
  dango sim run --phase rate=4,span=600 --phase rate=8,span=300,cv=3 --admission early --no-hold
  dango sim hit-rates
  dango sim faults --seeds 20

By default: a table on stdout, progress on stderr. The flags of each: dango sim NAME --help
"""

FAULTS = (BadSetup, BadTrace, BadCostModel, NoMatplotlib, OSError)
"""What one sentence tells a person."""


class Experiment(Protocol):
    """What a module in `simulator/experiments` has."""

    ABOUT: str
    """One line for the help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its own flags; --jobs, --json and --plot are those of all."""
        ...

    def run(self, args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
        """The figures, JSON-ready; tells of its progress meanwhile."""
        ...

    def table(self, report: dict[str, Any]) -> str:
        """The figures as text."""
        ...

    def draw(self, report: dict[str, Any], folder: Path) -> list[Path]:
        """Pictures of them in a folder; their paths."""
        ...


EXPERIMENTS: Mapping[str, Experiment] = {
    "run": run,
    "hit-rates": hit_rates,
    "rivals": rivals,
    "refusals": refusals,
    "oscillation": oscillation,
    "scheduling": scheduling,
    "caches": caches,
    "truth": truth,
    "faults": faults,
}
"""By name: a new one is a module there and a line here."""


def main(argv: Sequence[str] | None = None, experiments: Mapping[str, Experiment] = EXPERIMENTS) -> int:
    """The command. Returns the exit code: 1 for what one sentence tells, 2 for a wrong flag, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(experiments)
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    experiment = experiments[args.name]
    try:
        if args.plot is not None:
            require_matplotlib()  # before a run of minutes, not after it
        report = experiment.run(args, _tell)
        if args.json != "-":
            print(experiment.table(report), flush=True)
        if args.json is not None:
            _write(args.json, {"command": shlex.join(["dango", "sim", *words]), "experiment": args.name, **report})
        if args.plot is not None:
            for path in experiment.draw(report, args.plot):
                _tell(f"drew {path}")
    except KeyboardInterrupt:
        return 130
    except FAULTS as error:
        _tell(str(error))
        return 1
    return 0


def _write(where: str, body: dict[str, Any]) -> None:
    text = json.dumps(body, indent=1, allow_nan=False) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")


def _tell(sentence: str) -> None:
    print(f"dango sim: {sentence}", file=sys.stderr, flush=True)


def _parser(experiments: Mapping[str, Experiment]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dango sim",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, experiment in experiments.items():
        one = names.add_parser(name, help=experiment.ABOUT, description=experiment.ABOUT)
        experiment.add_arguments(one)
        one.add_argument("--jobs", type=_positive, default=1, help="processes at once (default: %(default)s)")
        one.add_argument(
            "--json", metavar="FILE", help="write all figures here; - is stdout, instead of the table"
        )
        one.add_argument("--plot", type=Path, metavar="FOLDER", help="draw plots into this folder")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
