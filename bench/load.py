"""Load on a live endpoint: what its clients see when there are many of them.

closed loop   so many streams; each sends its next request when its last one has ended
open loop     requests arrive at a mean rate, at random, however many have not ended yet
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from bench.client import Seen, StreamFailed, session, stream_answer
from bench.report import Row, Spread, percentile
from bench.service import running
from bench.setup import Setup, random_prompt

ABOUT = "TTFT, TPOT and throughput of many streams on a live endpoint, closed or open loop"

IN_FLIGHT_MAX = 1024
"""Of an open loop: a client with more open connections measures itself. Further arrivals count as errors."""

TOO_MANY = f"not sent: {IN_FLIGHT_MAX} requests were in flight"


@dataclass(frozen=True)
class Load:
    """What to send. `rate` requests a second make it an open loop, else `streams` make it a closed one."""

    prompt_tokens: int = 512
    output_tokens: int = 64
    requests: int = 32
    streams: int = 8
    rate: float | None = None
    vocab: int = 30_000
    """Prompts are random token ids below this."""


@dataclass
class Outcome:
    """What became of it."""

    seen: list[Seen] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """From the first request sent to the last one ended."""

    def rows(self) -> list[Row]:
        """For the report: milliseconds, and tokens of answers a second."""
        tokens = sum(len(seen.tokens_at) for seen in self.seen)
        rows = [*_percentiles("TTFT", [seen.ttft_s for seen in self.seen])]
        rows += _percentiles("TPOT", [seen.tpot_s for seen in self.seen if seen.tpot_s is not None])
        rows.append(_single("output", "tokens/s", tokens / max(self.seconds, 1e-9)))
        rows.append(_single("requests answered", "", float(len(self.seen))))
        rows.append(_single("requests failed", "", float(self.errors.total())))
        rows += [_single(f"  {text}", "", float(count)) for text, count in self.errors.most_common()]
        return rows


async def run(setup: Setup, load: Load, url: str | None) -> list[Row]:
    """Put the load on `url`, or on a service of its own. Raises NotStarted."""
    if url is not None:
        return (await drive(url, load, setup.dice())).rows()
    async with running(setup) as service:
        return (await drive(service.url, load, setup.dice())).rows()


async def drive(url: str, load: Load, dice: random.Random) -> Outcome:
    """Send all requests and wait for all answers; failures are counted, not raised."""
    outcome = Outcome()
    clock = asyncio.get_running_loop().time
    began = clock()
    async with session() as http:
        if load.rate is None:
            await _closed(http, url, load, dice, outcome)
        else:
            await _open(http, url, load, dice, outcome)
    outcome.seconds = clock() - began
    return outcome


async def _closed(
    http: aiohttp.ClientSession, url: str, load: Load, dice: random.Random, outcome: Outcome
) -> None:
    left = iter(range(load.requests))

    async def stream() -> None:
        for _ in left:
            await _one(http, url, load, random_prompt(dice, load.prompt_tokens, load.vocab), outcome)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(load.streams, load.requests)):
            tasks.create_task(stream())


async def _open(http: aiohttp.ClientSession, url: str, load: Load, dice: random.Random, outcome: Outcome) -> None:
    assert load.rate is not None
    clock = asyncio.get_running_loop().time
    began, flying = clock(), set[asyncio.Task[None]]()
    async with asyncio.TaskGroup() as tasks:
        for due in itertools.islice(arrivals(load.rate, dice), load.requests):
            await asyncio.sleep(began + due - clock())  # by the plan, not by the last one: no drift
            flying = {task for task in flying if not task.done()}
            if len(flying) >= IN_FLIGHT_MAX:
                outcome.errors[TOO_MANY] += 1
                continue
            prompt = random_prompt(dice, load.prompt_tokens, load.vocab)
            flying.add(tasks.create_task(_one(http, url, load, prompt, outcome)))


async def _one(http: aiohttp.ClientSession, url: str, load: Load, prompt: list[int], outcome: Outcome) -> None:
    try:
        outcome.seen.append(await stream_answer(http, url, prompt, load.output_tokens))
    except StreamFailed as error:
        outcome.errors[str(error)] += 1


def arrivals(rate: float, dice: random.Random) -> Iterator[float]:
    """When requests of a Poisson process arrive, in seconds from now."""
    at = 0.0
    while True:
        yield at
        at += dice.expovariate(rate)


def _percentiles(name: str, seconds: list[float]) -> list[Row]:
    if not seconds:
        return []
    return [_single(f"{name} p{percent}", "ms", 1000 * percentile(seconds, percent)) for percent in (50, 99)]


def _single(name: str, unit: str, value: float) -> Row:
    return Row(name, unit, Spread.of([value]))
