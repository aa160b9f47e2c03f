"""Where decode binds, the longest prompts have their turn too, for some of the tokens and a few refusals more."""

from simulator.drive import simulate
from simulator.report import report_of
from simulator.setup import Setup

LONGEST = ">64k"


def refused(share: float) -> tuple[int, int]:
    """How many in all, and of the longest."""
    setup = Setup(limit=900, prefill=12, decode=1, speed=2.0, rescue_share=share)
    run = simulate(setup)
    summary = report_of(setup, run.outcomes, run.series)["summary"]
    return summary["refused"], summary["refused_by_length"][LONGEST]


def test_fewer_of_the_longest_are_refused_and_not_many_more_in_all() -> None:
    (before, longest_before), (after, longest_after) = refused(0.0), refused(0.1)
    assert longest_after <= 0.85 * longest_before
    assert after <= 1.25 * before
