"""A cost model of this machine, from what clients of the live service see while little else is asked of it.

prefill   one prompt at a time, of several lengths, one token each: TTFT, less what is not the prefill instance's
step      so many streams at once, their prompts cached: the time between their tokens. The Conductor deals them
          out evenly, so two have a decode instance each, and eight make two batches of four
sharing   two prompts at once, two streams, and prompts beside streams, against one alone: how much slower each of
          so many busy instances is

All are the service's own processes, where they will be under load. Nothing of the load itself is fitted.
"""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median

import aiohttp
import numpy

from bench.client import Seen, StreamFailed, steady_tpot_s, stream_answer
from bench.service import Service
from bench.setup import Setup, random_prompt
from simulator.cost import CostModel, PassCost, StepCost

PROMPTS = (32, 128, 256, 512, 768, 1024, 1536)
"""Tokens of the prompts that come alone: parts of a pass of 512 tokens, one, and up to three."""

PAIRED = (256, 512)
"""Tokens of the prompts that come in pairs."""

MIXED = ((1, 1), (1, 2), (2, 2))
"""(prompts, streams) at a time: so many prefill and decode instances are busy."""

MIXED_PROMPT = 512
"""Tokens of the prompts beside streams, one after the other; one of PROMPTS."""

MIXED_ANSWER = 100
"""Tokens of those streams: some prompts pass beside them."""

STREAMS = (1, 2, 4, 8)
CONTEXTS = (48, 432)
"""Tokens of the prompt of each stream; whole blocks, but not so that all is cached but one token."""

ANSWER = 40
"""Tokens of a stream: enough for all to run together for a while."""

REPEATS = 3

REST_S = 0.3
"""For the service to give blocks back and write them back."""

LEAST_S = 1e-6
"""Of a step: the fit may leave nothing for what does not depend on its size, and a step still takes time."""

FASTEST_BYTES_S = 10e9
"""Of copying KV: where loading a prefix is too fast to be seen, memory's own rate for one thread, about."""

LOAD_SEEN = 1.2
"""A pass that takes so many times as long as predicted waited for its prefix to arrive; less is noise."""

PHASES = (
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "dango:request_store_wait_time_seconds_sum",
)
"""What the prefill instance takes of a TTFT."""


@dataclass
class Probes:
    """What was seen, in seconds."""

    alone: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """TTFT by tokens of the prompt, beyond `request_s`."""
    paired: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Likewise of each of two at once."""
    steps: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Time between tokens by (streams, tokens of the prompt of each)."""
    mixed: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """(TTFT of a prompt of MIXED_PROMPT tokens, time between tokens of a stream) by how many of each there are."""
    request_s: float = 0.0
    """Of a TTFT, what no prefill instance takes."""
    warm_s: float = 0.0
    """TTFT of a block of tokens after the longest of PROMPTS, cached; beyond `request_s`."""


async def probe(service: Service, http: aiohttp.ClientSession, setup: Setup) -> Probes:
    """Ask and time; takes about a minute and a half on two cores. Raises StreamFailed."""
    asker = _Asker(service, http, setup.dice(), setup.open().tokenizer.vocab)
    await asker.stream(asker.prompt(64), ANSWER)  # the first one is slower
    probes = Probes()
    await _probe_prefill(asker, probes)
    await _probe_steps(asker, probes)
    await _probe_mixed(asker, probes)
    return probes


class _Asker:
    """One who asks the service for answers, with prompts that nobody has cached."""

    def __init__(self, service: Service, http: aiohttp.ClientSession, dice: random.Random, vocab: int) -> None:
        self._service = service
        self._http = http
        self._dice = dice
        self._vocab = vocab

    def prompt(self, tokens: int) -> list[int]:
        return random_prompt(self._dice, tokens, self._vocab)

    async def stream(self, prompt: list[int], tokens: int) -> Seen:
        return await stream_answer(self._http, self._service.url, prompt, tokens)

    async def ttfts(self, prompts: Sequence[list[int]], rest_s: float = REST_S) -> list[float]:
        """Of all at once, one token each."""
        seen = await asyncio.gather(*(self.stream(prompt, 1) for prompt in prompts))
        await asyncio.sleep(rest_s)
        return [one.ttft_s for one in seen]

    async def phases_s(self) -> float:
        """What prefill instances have taken of all TTFTs so far."""
        return sum([await self._service.metric(self._http, name) for name in PHASES])


async def _probe_prefill(asker: _Asker, probes: Probes) -> None:
    ttfts, prompt = [], asker.prompt(PROMPTS[-1])
    before_s = await asker.phases_s()
    raw: dict[int, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for tokens in PROMPTS:
            prompt = asker.prompt(tokens)
            [ttft_s] = await asker.ttfts([prompt])
            raw[tokens].append(ttft_s)
            ttfts.append(ttft_s)
    probes.request_s = request_s = max((sum(ttfts) - await asker.phases_s() + before_s) / len(ttfts), 0.0)
    warm = [(await asker.ttfts([prompt + asker.prompt(PROMPTS[0])]))[0] for _ in range(REPEATS)]
    probes.warm_s = median(warm) - request_s
    for tokens in PROMPTS:
        probes.alone[tokens] = [ttft_s - request_s for ttft_s in raw[tokens]]
    for tokens in PAIRED * REPEATS:
        pair = await asker.ttfts([asker.prompt(tokens) for _ in range(2)])
        probes.paired[tokens] += [ttft_s - request_s for ttft_s in pair]


async def _probe_steps(asker: _Asker, probes: Probes) -> None:
    for context in CONTEXTS:
        prompts = [asker.prompt(context) for _ in range(max(STREAMS))]
        await asker.ttfts(prompts)  # cached from now on: the streams start together
        for streams in STREAMS * REPEATS:
            seen = await asyncio.gather(*(asker.stream(prompt, ANSWER) for prompt in prompts[:streams]))
            probes.steps[streams, context].append(_tpot_s(seen))
            await asyncio.sleep(REST_S)


async def _probe_mixed(asker: _Asker, probes: Probes) -> None:
    prompts = [asker.prompt(CONTEXTS[0]) for _ in range(max(streams for _, streams in MIXED))]
    await asker.ttfts(prompts)  # cached from now on
    for at_once, streams in MIXED * REPEATS:
        running = asyncio.gather(*(asker.stream(prompt, MIXED_ANSWER) for prompt in prompts[:streams]))
        ttfts: list[float] = []
        while not running.done():
            ttfts += await asker.ttfts([asker.prompt(MIXED_PROMPT) for _ in range(at_once)], rest_s=0.0)
        ttft_s = median(ttfts) - probes.request_s
        probes.mixed[at_once, streams].append((ttft_s, _tpot_s(await running)))
        await asyncio.sleep(REST_S)


def _tpot_s(streams: Sequence[Seen]) -> float:
    """While all ran, or of those that were over before the last began: a model so small that it hardly matters."""
    try:
        return steady_tpot_s(streams)
    except StreamFailed:
        return max(sum(seen.tpot_s or 0.0 for seen in streams) / len(streams), LEAST_S)


# -- fits: pure ---------------------------------------------------------------------------------------


def fitted(probes: Probes, setup: Setup, chunk_tokens: int) -> CostModel:
    """The cost model that probes of the service of `setup` come to."""
    manifest = setup.open().manifest
    layout = manifest.layout
    kv_bytes_token = layout.block_bytes // layout.block_tokens
    prefill = fit_passes({tokens: median(seen) for tokens, seen in probes.alone.items()}, chunk_tokens)
    copied = fit_bytes_s(probes.warm_s, PROMPTS[-1] * kv_bytes_token, _pass_s(prefill, PROMPTS[0], PROMPTS[-1]))
    return CostModel(
        name="this-machine",
        layers=layout.layers,
        kv_bytes_token=kv_bytes_token,
        prefill=prefill,
        step=fit_steps({key: median(seen) for key, seen in probes.steps.items()}, _pair_speed_of_steps(probes)),
        host_bytes_s=copied,
        network_bytes_s=copied,  # all instances are on one host, and map the same memory
        pages_tokens=2 * manifest.context_tokens,  # as an engine's pages are by default
        request_s=probes.request_s,
        speeds=speeds(probes),
    )


def speeds(probes: Probes) -> tuple[float, ...]:
    """Of a CostModel: how fast each of 1, 2, 3 and 4 busy instances is, and never slower than with one more: the
    geometric mean of what prefill and decode show, alone and beside each other."""
    seen: dict[int, list[float]] = defaultdict(list)
    seen[2] = [_pair_speed_of_passes(probes), _pair_speed_of_steps(probes)]
    pass_s = median(probes.alone[MIXED_PROMPT])
    step_s = median(probes.steps[1, CONTEXTS[0]])
    for (at_once, streams), beside in probes.mixed.items():
        seen[at_once + streams].append(pass_s / median(ttft_s for ttft_s, _ in beside))
        seen[at_once + streams].append(step_s / median(tpot_s for _, tpot_s in beside))
    found = [1.0]
    for busy in sorted(seen):
        found.append(min(geometric_mean(seen[busy]), found[-1]))
    return tuple(found)


def fit_passes(seconds: dict[int, float], chunk_tokens: int) -> PassCost:
    """From the time of all passes of a prompt, by its tokens."""
    rows = [(-(-tokens // chunk_tokens), tokens, tokens * tokens / 2) for tokens in seconds]
    return PassCost(*nonnegative_fit(rows, list(seconds.values())))


def fit_bytes_s(warm_s: float, size: int, compute_s: float) -> float:
    """Of copying KV: a pass that should take `compute_s` took `warm_s`, while `size` bytes came."""
    return min(size / warm_s, FASTEST_BYTES_S) if warm_s > LOAD_SEEN * compute_s else FASTEST_BYTES_S


def _pass_s(cost: PassCost, tokens: int, prefix: int) -> float:
    return cost.base_s + cost.token_s * tokens + cost.pair_s * tokens * (prefix + tokens / 2)


def fit_steps(seconds: dict[tuple[int, int], float], pair: float) -> StepCost:
    """From the time between tokens by (streams, tokens of each one's prompt); a pair is slower by its speed."""
    rows, alone = [], []
    for (streams, context), step_s in seconds.items():
        batch = max(streams / 2, 1)
        rows.append((1.0, batch, batch * (context + ANSWER / 2)))
        alone.append(step_s * (pair if streams > 1 else 1.0))
    base_s, row_s, token_s = nonnegative_fit(rows, alone)
    return StepCost(max(base_s, LEAST_S), row_s, token_s)


def nonnegative_fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients, none below 0, of the terms in each row: those with the least sum of squared relative errors.

    There are few terms, so every choice of them is tried: the best whose plain least squares are not negative.
    """
    scaled = numpy.asarray(rows, dtype=float) / numpy.asarray(values, dtype=float)[:, None]
    best, least = numpy.zeros(scaled.shape[1]), numpy.inf
    for count in range(1, scaled.shape[1] + 1):
        for chosen in itertools.combinations(range(scaled.shape[1]), count):
            found = numpy.zeros(scaled.shape[1])
            found[list(chosen)] = numpy.linalg.lstsq(scaled[:, chosen], numpy.ones(len(values)), rcond=None)[0]
            error = float(numpy.sum((scaled @ found - 1) ** 2))
            if found.min() >= 0 and error < least:
                best, least = found, error
    return [float(value) for value in best]


def _pair_speed_of_passes(probes: Probes) -> float:
    return median(median(probes.alone[tokens]) / median(pair) for tokens, pair in probes.paired.items())


def _pair_speed_of_steps(probes: Probes) -> float:
    return median(median(probes.steps[1, context]) / median(probes.steps[2, context]) for context in CONTEXTS)
