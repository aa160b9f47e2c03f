"""`python -m bench`: measure, print a table, and perhaps write it down as JSON."""

import argparse
import json
import os
import random
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import (
    compression,
    decision,
    estimates,
    grain,
    index,
    load,
    mixed,
    overlap,
    reuse,
    start,
    store,
    tax,
    truth,
)
from bench.client import StreamFailed
from bench.machine import machine_facts, watched
from bench.pool import PoolFailed
from bench.report import Row, facts, table
from bench.service import NotStarted
from bench.setup import Setup, default_threads
from engine.architecture import UnsupportedModel
from engine.fetch import FetchError
from protocol.process import run_process
from protocol.settings import SettingsError

ABOUT = """\
Measure the service as anyone would start it: real processes, HTTP, the real model. Each benchmark starts a
service of its own if it needs one, prints a table of medians with their spread, and ends the service.

"""

EXAMPLES = """
examples:
  python -m bench all --json results.json
  python -m bench tax --runs 9
  python -m bench load --streams 16 --requests 64 --prompt-tokens 1024 --output-tokens 128
  python -m bench load --url http://127.0.0.1:8000 --rate 2.5
  python -m bench truth --record live.json

Figures mean something only on a machine that does nothing else: the report says what others took of it.
"""

QUIET_THREADS = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""As `dango serve` starts its instances: the engine alone must wait in the same way. Read when torch is loaded."""

FAULTS = (NotStarted, PoolFailed, StreamFailed, SettingsError, FetchError, UnsupportedModel)
"""What one sentence tells a person."""

Measure = Callable[[], Awaitable[list[Row]]]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 1 when something could not be measured."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    if not QUIET_THREADS.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "bench", *words], QUIET_THREADS | os.environ)
    setup = _setup(arguments)
    command = shlex.join(["python", "-m", "bench", *words])
    about = {"command": command, "seed": setup.seed, "threads": setup.threads, **machine_facts()}
    names = list(ABOUTS) if arguments.name == "all" else [arguments.name]
    benchmarks = _benchmarks(setup, arguments)
    reports: list[dict[str, Any]] = []

    async def measure() -> None:
        for name in names:
            with watched() as watch:
                rows = await _measured(name, benchmarks[name])
            told = {**about, **watch.facts(alone=name != "load" or arguments.url is None)}
            print(f"{table(rows)}\n\n{facts(told)}", flush=True)
            reports.append({"benchmark": name, "about": told, "rows": [row.body() for row in rows]})

    try:
        run_process(measure())
    except FAULTS as error:
        print(f"bench: {error}", file=sys.stderr)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    return 0 if len(reports) == len(names) else 1


ABOUTS = {
    "start": start.ABOUT,
    "tax": tax.ABOUT,
    "reuse": reuse.ABOUT,
    "overlap": overlap.ABOUT,
    "estimates": estimates.ABOUT,
    "decision": decision.ABOUT,
    "index": index.ABOUT,
    "load": load.ABOUT,
    "mixed": mixed.ABOUT,
    "truth": truth.ABOUT,
    "store": store.ABOUT,
    "grain": grain.ABOUT,
    "compression": compression.ABOUT,
}


def _benchmarks(setup: Setup, arguments: argparse.Namespace) -> Mapping[str, Measure]:
    wanted = load.Load(
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.requests,
        arguments.streams,
        arguments.rate,
        arguments.vocab,
    )
    return {
        "start": lambda: start.run(setup),
        "tax": lambda: tax.run(setup),
        "reuse": lambda: reuse.run(setup),
        "overlap": lambda: overlap.run(setup),
        "estimates": lambda: estimates.run(setup),
        "decision": lambda: decision.run(setup),
        "index": lambda: index.run(setup),
        "load": lambda: load.run(setup, wanted, arguments.url),
        "mixed": lambda: mixed.run(setup),
        "truth": lambda: truth.run(setup, truth.Choices(arguments.span, arguments.record)),
        "grain": lambda: grain.run(setup.runs),
        "compression": lambda: compression.run(setup, arguments.prompts),
        "store": lambda: store.run(setup.runs, arguments.peers == "all"),
    }


async def _measured(name: str, measure: Measure) -> list[Row]:
    print(f"\n{name}: {ABOUTS[name]}\n", flush=True)
    return await measure()


def _setup(arguments: argparse.Namespace) -> Setup:
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    threads = arguments.threads or default_threads()
    return Setup(arguments.model, arguments.dtype, threads, arguments.port, arguments.runs, seed)


def _parser() -> argparse.ArgumentParser:
    listed = "".join(f"  {name:<11}{about}\n" for name, about in ABOUTS.items())
    parser = argparse.ArgumentParser(
        "python -m bench",
        description=ABOUT + listed + "  all        these, one after another",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*ABOUTS, "all"], metavar="NAME", help="what to measure, as listed above")
    parser.add_argument("--model", default="", help="as MODEL of `dango serve`; its default model if not given")
    parser.add_argument("--dtype", default="", help="of weights and KV (default: the service's)")
    parser.add_argument("--threads", type=int, help="of each compute instance (default: half of the cores)")
    parser.add_argument("--runs", type=_positive, default=5, help="samples of each number (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="of the service; 0 takes any free one")
    parser.add_argument("--seed", type=int, help="of the random prompts (default: another each time)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    group, default = parser.add_argument_group("for load"), load.Load()
    group.add_argument("--url", help="a running service (default: one is started)")
    group.add_argument("--streams", type=_positive, default=default.streams, help="requests at once (%(default)s)")
    group.add_argument("--rate", type=float, help="requests a second, arriving at random, instead of --streams")
    group.add_argument("--requests", type=_positive, default=default.requests, help="in all (%(default)s)")
    group.add_argument("--prompt-tokens", type=_positive, default=default.prompt_tokens, help="(%(default)s)")
    group.add_argument("--output-tokens", type=_positive, default=default.output_tokens, help="(%(default)s)")
    group.add_argument("--vocab", type=_positive, default=default.vocab, help="ids are below this (%(default)s)")
    group, choices = parser.add_argument_group("for truth"), truth.Choices()
    group.add_argument("--span", type=float, default=choices.span_s, help="seconds of each part (%(default)s)")
    group.add_argument("--record", type=Path, metavar="FILE", help="write what `dango sim truth --live` reads")
    group = parser.add_argument_group("for compression")
    group.add_argument("--prompts", type=_positive, default=36, help="passages of the documents (%(default)s)")
    group = parser.add_argument_group("for store")
    group.add_argument("--peers", choices=("all", "none"), default="all", help="other stores (%(default)s)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
