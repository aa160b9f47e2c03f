"""Whatever goes wrong, every truth holds; and a seed tells the same story each time, in every process."""

import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from simulator.experiments import faults as experiment
from simulator.faults import LASTS_S, Kind, script_of
from simulator.parallel import in_order
from simulator.trial import try_seed

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200
CHUNK = 20
SOME = (5, 13, 55)
"""With all kinds of weather, and a Conductor that dies."""

TRACES = "from simulator.trial import try_seed; print([try_seed(s, record=True).trace for s in {}])"


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Services warn of every death, thousands of lines: what matters is in the results."""
    logging.getLogger("dango").setLevel(logging.ERROR)


def test_every_truth_holds_whatever_goes_wrong() -> None:
    """In as many processes as there are cores, a minute or two of each."""
    chunks = {f"from seed {first}": first for first in range(0, SEEDS, CHUNK)}
    for endings, broken in in_order(try_chunk, chunks, os.cpu_count() or 1, print):
        assert not broken, "\n".join(broken)
        assert endings["finished"] > endings.total() / 3, "there is too little left that could go wrong"


def try_chunk(first: int) -> tuple[Counter[str], list[str]]:
    """How the requests of these seeds ended, and what was not true."""
    logging.getLogger("dango").setLevel(logging.ERROR)
    endings, broken = Counter[str](), list[str]()
    for seed in range(first, first + CHUNK):
        result = try_seed(seed)
        endings += result.endings
        if result.broken:
            broken.append("\n  ".join([f"replay it with: dango sim faults --seed {seed}", *result.broken]))
    return endings, broken


def test_a_seed_gives_the_same_messages_at_the_same_times_in_every_process() -> None:
    here = [try_seed(seed, record=True).trace for seed in SOME]
    assert len(set(here)) == len(SOME)
    assert [try_seed(seed, record=True).trace for seed in SOME] == here
    for salt in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", TRACES.format(SOME)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout == f"{here}\n", done.stderr[-2000:]


def test_scripts_are_drawn_from_their_seeds_alone_and_hold_all_kinds_of_faults() -> None:
    scripts = [script_of(seed) for seed in range(50)]
    assert scripts == [script_of(seed) for seed in range(50)]
    drawn = [fault for script in scripts for fault in script.faults]
    assert {fault.kind for fault in drawn} == set(Kind)
    assert {fault.name.partition("-")[0] for fault in drawn} == {"prefill", "decode", "kvcache", "conductor"}
    assert all(fault.at_s + fault.for_s <= LASTS_S for fault in drawn)


def test_the_command_tells_the_story_of_a_seed() -> None:
    one = experiment.play(SOME[0])
    told = experiment.table({"seeds": [one], "broken": 0})
    assert all(str(fault) in told for fault in script_of(SOME[0]).faults)
    assert told.endswith("1 seeds, 0 of them broken")
    broken = {**one, "broken": ["3.000 s: a token was said twice"]}
    assert "BROKEN at 3.000 s: a token was said twice" in experiment.table({"seeds": [broken, one], "broken": 1})
