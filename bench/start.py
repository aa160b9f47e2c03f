"""How long the service takes to be ready, and how much memory it takes, as anyone would start it."""

from bench.client import session, stream_answer
from bench.report import Row, Spread
from bench.service import Service, running
from bench.setup import Setup, random_prompt

ABOUT = "time from `dango serve` to ready, and the memory of all processes together"

READY_S_MAX = 20.0
MEMORY_GIB_MAX = 3.0
FEW = 5
SHORT = 64
"""Tokens of each of a few prompts."""

LONG = 7000
ANSWER = 16
GIB = 1 << 30


async def run(setup: Setup) -> list[Row]:
    """Measure. The model is fetched before the clock starts. Raises NotStarted or StreamFailed."""
    model = setup.open()
    dice, vocab = setup.dice(), model.tokenizer.vocab
    long = min(LONG, model.manifest.context_tokens - ANSWER)
    ready, few, much, parts = [], [], [], {}
    for _ in range(setup.runs):
        async with running(setup) as service, session() as http:
            ready.append(service.ready_s)
            for _ in range(FEW):
                await stream_answer(http, service.url, random_prompt(dice, SHORT, vocab), ANSWER)
            few.append(_gib(service))
            await stream_answer(http, service.url, random_prompt(dice, long, vocab), ANSWER)
            much.append(_gib(service))
            parts = service.memory_bytes()
    return [
        Row("start to ready", "s", Spread.of(ready), limit=READY_S_MAX),
        Row(f"memory after {FEW} short requests", "GiB", Spread.of(few), limit=MEMORY_GIB_MAX),
        Row(f"memory after {long:,} tokens more", "GiB", Spread.of(much), limit=MEMORY_GIB_MAX),
        *(Row(f"  of that, {name}", "GiB", Spread.of([size / GIB])) for name, size in parts.items()),
    ]


def _gib(service: Service) -> float:
    return sum(service.memory_bytes().values()) / GIB
