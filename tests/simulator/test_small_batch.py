"""A decode instance whose batch has few rows: who comes beyond would wait for a place with its first token out."""

from dataclasses import replace

from simulator.drive import served
from simulator.loop import run_virtual
from simulator.plan import plan_of
from simulator.setup import Setup

ROWS = 8


def test_nobody_is_let_in_for_whom_there_is_no_row() -> None:
    setup = Setup(limit=300, decode=1, rescue_share=0.0)  # a rescued prompt may come later than predicted
    arrivals = setup.arrivals()
    plan = plan_of(setup, arrivals)
    plan = replace(plan, decode=replace(plan.decode, batch_max=ROWS))

    run = run_virtual(served(plan, setup, arrivals))
    refused = [one for one in run.outcomes if one.refused]
    assert 0 < len(refused) < len(arrivals)
    assert all(one.tbt_s <= setup.tbt_limit_s for one in run.outcomes if not one.refused)
