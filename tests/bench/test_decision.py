"""A decision is taken in full, in a cluster that is busy as it says."""

import asyncio
import random

from bench.decision import DECISIONS, INSTANCES, QUEUED, STREAMS, Desk, a_busy_view, run
from bench.setup import Setup
from protocol.registry import Pool


def test_the_parts_of_a_decision_are_told_beside_the_whole() -> None:
    whole, placement, judgement, hand_over = asyncio.run(run(Setup(runs=1)))
    assert whole.limit == 1.0
    assert all(row.measured.count == DECISIONS and row.measured.low > 0 for row in (whole, hand_over))
    assert whole.measured.low >= placement.measured.low + judgement.measured.low


def test_the_cluster_is_as_busy_as_it_says() -> None:
    view = a_busy_view(random.Random(1))
    view.check()
    assert [len(one.prompts) for one in view.of(Pool.PREFILL)] == [QUEUED] * INSTANCES
    assert [len(one.streams) for one in view.of(Pool.DECODE)] == [STREAMS] * INSTANCES
    assert all(0.7 * STREAMS < one.batch[0] < STREAMS for one in view.of(Pool.DECODE))


def test_the_request_is_placed_and_admitted() -> None:
    desk = Desk(random.Random(1))
    desk.decide(1.0)
    assert (desk.plan.reuse, desk.plan.source) == (120, "kvcache-03")
    assert desk.judgement.decode is not None
