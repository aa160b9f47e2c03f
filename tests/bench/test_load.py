"""Load: every request is sent and accounted for, in both loops."""

import itertools
import random
from dataclasses import replace

import pytest

from bench.client import Seen
from bench.load import Load, Outcome, arrivals, drive
from tests.bench.endpoint import an_endpoint

SMALL = Load(prompt_tokens=5, output_tokens=3, requests=10, streams=4, vocab=100)


def test_arrivals_come_at_their_rate_at_random() -> None:
    times = list(itertools.islice(arrivals(4.0, random.Random(1)), 10_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


@pytest.mark.parametrize("rate", [None, 500.0])
async def test_all_requests_are_sent_and_all_answers_counted(rate: float | None) -> None:
    async with an_endpoint() as endpoint:
        outcome = await drive(endpoint.url, replace(SMALL, rate=rate), random.Random(1))
    assert len(outcome.seen) == len(endpoint.bodies) == 10
    assert outcome.errors.total() == 0
    prompts = [tuple(body["prompt"]) for body in endpoint.bodies]
    assert len(set(prompts)) == 10
    assert all(len(prompt) == 5 and max(prompt) < 100 for prompt in prompts)


async def test_a_closed_loop_has_no_more_open_than_its_streams() -> None:
    async with an_endpoint() as endpoint:
        await drive(endpoint.url, SMALL, random.Random(1))
    assert endpoint.open_most == 4


@pytest.mark.parametrize("rate", [None, 500.0])
async def test_failures_are_counted_by_what_they_say_and_stop_nothing(rate: float | None) -> None:
    async with an_endpoint(2, 5) as endpoint:
        outcome = await drive(endpoint.url, replace(SMALL, rate=rate), random.Random(1))
    assert len(outcome.seen) == 8
    assert outcome.errors == {"HTTP 429: full": 2}


async def test_the_same_dice_give_the_same_prompts() -> None:
    async with an_endpoint() as one, an_endpoint() as other:
        for endpoint in (one, other):
            await drive(endpoint.url, replace(SMALL, streams=1), random.Random(7))
    assert one.bodies == other.bodies


def test_an_outcome_in_rows() -> None:
    outcome = Outcome(seconds=2.0)
    outcome.seen = [Seen(0.0, [0.1, 0.2, 0.3], 5, 0), Seen(0.0, [0.5, 0.7, 0.9], 5, 0)]
    outcome.errors["HTTP 429: full"] = 3
    rows = {row.name: row.measured.median for row in outcome.rows()}
    assert rows["TTFT p50"] == pytest.approx(100.0)
    assert rows["TTFT p99"] == pytest.approx(500.0)
    assert rows["TPOT p50"] == pytest.approx(100.0)
    assert rows["TPOT p99"] == pytest.approx(200.0)
    assert rows["output"] == 3.0
    assert (rows["requests answered"], rows["requests failed"], rows["  HTTP 429: full"]) == (2, 3, 3)


def test_an_outcome_without_answers_has_no_percentiles() -> None:
    rows = [row.name for row in Outcome(seconds=1.0).rows()]
    assert rows == ["output", "requests answered", "requests failed"]
