"""Several runs at once, each in a process of its own. What comes out does not depend on how many."""

import multiprocessing
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from typing import TypeVar

from simulator.report import Report, report_of
from simulator.setup import Setup

T = TypeVar("T")
R = TypeVar("R")

Tell = Callable[[str], None]
"""Hears a sentence of progress."""


def simulate_all(setups: Mapping[str, Setup], jobs: int, tell: Tell) -> dict[str, Report]:
    """Run every setup, at most `jobs` at once. Labels and their order stay. Raises what a run raises."""
    return dict(zip(setups, in_order(simulated, setups, jobs, tell), strict=True))


def in_order(work: Callable[[T], R], named: Mapping[str, T], jobs: int, tell: Tell) -> list[R]:
    """`work` done on each value, at most `jobs` at once in processes of their own; results in the order given.

    `work` is a function of a module, and what goes in and comes out can be pickled. Raises what the first one in
    order raises; those not begun are then left out.
    """
    began, done = time.monotonic(), []
    with closing(_each(work, list(named.values()), jobs)) as results:
        for number, (label, result) in enumerate(zip(named, results, strict=True), start=1):
            done.append(result)
            tell(f"{number}/{len(named)} after {time.monotonic() - began:.0f} s: {label}")
    return done


def _each(work: Callable[[T], R], values: Sequence[T], jobs: int) -> Generator[R, None, None]:
    if min(jobs, len(values)) <= 1:
        yield from map(work, values)
        return
    # spawn: a fresh interpreter inherits no loop, no lock and no generator's state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(values)), mp_context=context) as pool:
        try:
            yield from pool.map(work, values)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def simulated(setup: Setup) -> Report:
    """One run, as figures."""
    # Imported here: an experiment that simulates nothing then needs no service, and no torch.
    from simulator.drive import simulate

    run = simulate(setup)
    return report_of(setup, run.outcomes, run.series)
