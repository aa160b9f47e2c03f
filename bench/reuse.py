"""What the cache saves: a long prefix and a new ending, after the prefix was computed once and before."""

import asyncio

from bench.client import session, stream_answer
from bench.report import Row, Spread
from bench.service import running
from bench.setup import Setup, random_prompt

ABOUT = "TTFT of a 3,000-token prefix and 64 new tokens, warm against cold"

PREFIX = 3000
NEW = 64
WARM_MAX = 0.2

REST_S = 0.3
"""Between two requests, for the first one's blocks to be given back."""


async def run(setup: Setup) -> list[Row]:
    """Measure. Raises NotStarted or StreamFailed."""
    dice, vocab = setup.dice(), setup.open().tokenizer.vocab
    cold, warm, cached = [], [], []
    async with running(setup) as service, session() as http:
        for number in range(setup.runs + 1):
            prefix = random_prompt(dice, PREFIX, vocab)
            asks = [prefix + random_prompt(dice, NEW, vocab) for _ in range(2)]
            first = await stream_answer(http, service.url, asks[0], 1)
            await asyncio.sleep(REST_S)
            second = await stream_answer(http, service.url, asks[1], 1)
            await asyncio.sleep(REST_S)
            if number > 0:  # the first is slower
                cold.append(1000 * first.ttft_s)
                warm.append(1000 * second.ttft_s)
                cached.append(float(second.cached_tokens))
    return [
        Row("TTFT, warm against cold", "ms", Spread.of(warm), Spread.of(cold), WARM_MAX),
        Row(f"cached tokens of {PREFIX + NEW:,}", "tokens", Spread.of(cached)),
    ]
