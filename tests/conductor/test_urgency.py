"""A request's class and limits: what its fields and headers make of it."""

import math

import pytest

from conductor.ask import Limits, Priority
from conductor.config import ConductorConfig
from conductor.problem import Problem
from conductor.urgency import LIMIT_S_MAX, TBT_HEADER, TTFT_HEADER, Tier, Urgency

CONFIG = ConductorConfig(ttft_limit_s=10.0, tbt_limit_s=0.1, batch_ttft_limit_s=100.0, batch_tbt_limit_s=0.0)


@pytest.mark.parametrize(
    ("tier", "rank", "priority", "told"),
    [
        (None, 0, Priority.INTERACTIVE, None),
        (None, -5, Priority.INTERACTIVE, None),
        (None, 1, Priority.BATCH, None),
        ("auto", 0, Priority.INTERACTIVE, "default"),
        ("default", 0, Priority.INTERACTIVE, "default"),
        ("priority", 0, Priority.INTERACTIVE, "default"),
        ("scale", 0, Priority.INTERACTIVE, "default"),
        ("flex", 0, Priority.BATCH, "flex"),
        ("flex", -5, Priority.BATCH, "flex"),
        ("auto", 1, Priority.BATCH, "flex"),
    ],
)
def test_either_field_makes_a_request_one_of_batch(
    tier: Tier | None, rank: int, priority: Priority, told: str | None
) -> None:
    urgency = Urgency(tier, rank)
    assert (urgency.priority, urgency.served_tier) == (priority, told)


def test_limits_are_the_bodys_or_the_headers_or_those_of_the_class() -> None:
    headers = {TTFT_HEADER: "3", TBT_HEADER: "0.5"}
    assert Urgency().limits(CONFIG) == Limits(10.0, 0.1)
    assert Urgency("flex").limits(CONFIG) == Limits(100.0, math.inf)
    assert Urgency("flex", tbt_s=0.2).limits(CONFIG) == Limits(100.0, 0.2)
    assert Urgency().with_headers(headers).limits(CONFIG) == Limits(3.0, 0.5)
    assert Urgency(ttft_s=4.0).with_headers(headers).limits(CONFIG) == Limits(4.0, 0.5)
    assert Urgency(rank=2).with_headers({}) == Urgency(rank=2)


def test_no_limit_at_all() -> None:
    config = ConductorConfig(ttft_limit_s=0.0, tbt_limit_s=0.0)
    assert Urgency().limits(config) == Limits(math.inf, math.inf)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "3600.1", "1e400"])
@pytest.mark.parametrize("name", [TTFT_HEADER, TBT_HEADER])
def test_a_header_that_is_no_limit_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(Problem, match=f"{name} must be a number of seconds") as caught:
        Urgency().with_headers({name: text})
    assert (caught.value.status, caught.value.param) == (400, name)


def test_an_hour_is_the_longest() -> None:
    assert Urgency().with_headers({TTFT_HEADER: f"{LIMIT_S_MAX}"}).ttft_s == LIMIT_S_MAX
