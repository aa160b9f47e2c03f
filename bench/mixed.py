"""How well the Conductor predicts while the live service has prompts and answers of all lengths to compute.

One prefill and one decode instance, as `dango serve` starts them, each with its share of the cores. So many
clients, each of which sends the next request of a public trace, scaled down, when its last one has ended: whatever
the machine can do, it is as busy as that makes it.
"""

from collections.abc import Iterator

import aiohttp

from bench.client import ANSWER_S_MAX, session, stream_answer
from bench.prediction import ERROR_MAX, STEP, TTFT, median_error
from bench.report import Row, Spread
from bench.service import running
from bench.setup import Setup
from bench.truth import prompt_of, scaled_down
from protocol.tasks import together
from simulator.setup import Setup as SimulatedSetup
from simulator.workload import Arrival

ABOUT = "error of predicted TTFT and decode steps of the live service, with short and long prompts at once"

CLIENTS = (2, 8)
"""Of each load: one where an instance often computes alone, and one where both always have something to do."""

REQUESTS = 80
"""Of each load: several times as many as the fits need to know this machine under load."""

SKIP = 1000
"""Requests of the conversation trace before those that are sent: the first ones have fewer shared prefixes."""

NAMES = {TTFT: "time to first token", STEP: "first decode step"}


async def run(setup: Setup) -> list[Row]:
    """Measure each load on services of its own. Raises NotStarted or StreamFailed."""
    rows = []
    for clients in CLIENTS:
        errors = [await _errors(setup, clients) for _ in range(setup.runs)]
        for name, told in NAMES.items():
            spread = Spread.of([one[name] for one in errors])
            rows.append(Row(f"{clients} clients: error of predicted {told}", "%", spread, limit=ERROR_MAX[name]))
    return rows


async def _errors(setup: Setup, clients: int) -> dict[str, float]:
    """Median errors in per cent, by the metric of the ratios."""
    block_tokens = setup.open().manifest.layout.block_tokens
    async with running(setup) as service, session() as http:
        await drive(http, service.url, requests(block_tokens), clients, block_tokens, setup)
        return {name: median_error(await service.histogram(http, name)) for name in NAMES}


def requests(block_tokens: int) -> Iterator[Arrival]:
    """What is sent, in order; when each arrived in the trace plays no role."""
    arrivals = SimulatedSetup(skip=SKIP, limit=REQUESTS).arrivals()
    return iter([scaled_down(arrival, block_tokens) for arrival in arrivals])


async def drive(
    http: aiohttp.ClientSession,
    url: str,
    left: Iterator[Arrival],
    clients: int,
    block_tokens: int,
    setup: Setup,
) -> None:
    """So many clients at once until none is left. Raises StreamFailed if one is not answered."""
    vocab = setup.open().tokenizer.vocab

    async def client() -> None:
        for arrival in left:
            prompt = prompt_of(arrival, block_tokens, vocab, setup.seed)
            await stream_answer(http, url, prompt, arrival.output, ttft_limit_s=ANSWER_S_MAX)  # refuse nothing

    await together(client() for _ in range(clients))
