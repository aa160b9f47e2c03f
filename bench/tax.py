"""What disaggregation costs: the whole service against its engine alone in one process.

The two never run at once: each answer is waited for, and the service then rests. They take turns, so that
whatever drifts on the machine drifts for both.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import aiohttp

from bench.client import session, steady_tpot_s, stream_answer
from bench.engine import BareEngine, bare_engine
from bench.report import Row, Spread
from bench.service import Service, running
from bench.setup import Setup, random_prompt

ABOUT = "TTFT of uncached prompts and TPOT at 1 and 8 streams, against the same engine in one process"

PROMPTS = (512, 2048)
"""Tokens, for TTFT."""

STREAMS = (1, 8)
STREAM_PROMPT = 128
"""Tokens before each stream's answer: short, so that all streams soon run."""

ANSWER = 64
"""Tokens of an answer whose TPOT is taken."""

LEAD = 64
"""More tokens where there are several streams: the first runs alone until the last has its first token."""

TAX_MAX = 1.15

REST_S = 0.3
"""For the service to give blocks back and write them back, before the engine alone is measured."""

Pair = tuple[float, float]
"""Milliseconds: service, engine."""


async def run(setup: Setup) -> list[Row]:
    """Measure. Raises NotStarted or StreamFailed."""
    async with running(setup) as service, bare_engine(setup) as engine, session() as http:
        cases = _cases(service, engine, http, setup.dice(), setup.open().tokenizer.vocab)
        for case in cases.values():
            await case()  # the first of each kind is slower, on both sides
        pairs: dict[str, list[Pair]] = {name: [] for name in cases}
        for _ in range(setup.runs):
            for name, case in cases.items():
                pairs[name].append(await case())
    return [
        Row(name, "ms", Spread.of([ours for ours, _ in both]), Spread.of([alone for _, alone in both]), TAX_MAX)
        for name, both in pairs.items()
    ]


def _cases(
    service: Service, engine: BareEngine, http: aiohttp.ClientSession, dice: random.Random, vocab: int
) -> dict[str, Callable[[], Awaitable[Pair]]]:
    async def ttft(tokens: int) -> Pair:
        prompt = random_prompt(dice, tokens, vocab)
        seen = await stream_answer(http, service.url, prompt, 1)
        await asyncio.sleep(REST_S)
        return 1000 * seen.ttft_s, 1000 * await engine.ttft_s(prompt)

    async def tpot(streams: int) -> Pair:
        prompts = [random_prompt(dice, STREAM_PROMPT, vocab) for _ in range(streams)]
        tokens = ANSWER if streams == 1 else ANSWER + LEAD
        asks = [stream_answer(http, service.url, prompt, tokens) for prompt in prompts]
        seen = await asyncio.gather(*asks)
        await asyncio.sleep(REST_S)
        return 1000 * steady_tpot_s(seen), 1000 * await engine.tpot_s(prompts, ANSWER)

    cases: dict[str, Callable[[], Awaitable[Pair]]] = {}
    for tokens in PROMPTS:
        cases[f"TTFT, {tokens:,} tokens"] = lambda tokens=tokens: ttft(tokens)  # type: ignore[misc]
    for streams in STREAMS:
        cases[f"TPOT, {streams} streams"] = lambda streams=streams: tpot(streams)  # type: ignore[misc]
    return cases
