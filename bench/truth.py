"""Does simulation tell the truth? The live service, two prefill and two decode instances on this machine, and the
simulator with a cost model that was fitted to the same service before, on the same requests. Beside it, how well
the Conductor predicts under this load.

    service 1   calibration: requests one at a time, in pairs, a few streams ──> cost model
    service 2   part "moderate": a slice of the public conversation trace, scaled down
    service 3   part "overload": another slice, more than the machine can do, with a TTFT limit

Each part has a service of its own: what one has cached and learned is nothing to the next.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from bench.calibration import fitted, probe
from bench.client import Refused, session, stream_answer
from bench.machine import machine_facts
from bench.prediction import ERROR_MAX, median_error
from bench.report import Row, Spread
from bench.service import running
from bench.setup import Setup
from conductor.config import ConductorConfig
from decode_pool.config import DecodeConfig
from kvcache_pool.config import KVCacheConfig
from protocol.settings import load_section
from simulator.cost import CostModel, body_of
from simulator.experiments import truth
from simulator.experiments.truth import Part, Recording, Sent
from simulator.setup import Setup as SimulatedSetup
from simulator.workload import BLOCK_TOKENS, Arrival

ABOUT = "the live service against the simulator with a fitted cost model, on the same requests"

PREFILL, DECODE = 2, 2
FLEET = ("--prefill", str(PREFILL), "--decode", str(DECODE), "--kvcache", str(PREFILL))
"""Each prefill instance has a segment beside it, as in the simulator."""

OUTPUTS_TIMES = 1 / 8
"""Answers of the trace become 43 tokens in the mean: enough gaps for a TPOT, and on two cores prefill and decode
then have about equal work. Prompts are scaled by the size of a block, so that blocks stay blocks."""

BATCH = 2
"""Rows of a decode step, where the load that a request makes is reckoned up."""

TURNS = 3
"""How many requests there are depends on their work, and that on which they are; it settles at once, nearly."""

WARM_SHARE = 0.15
"""Of a part's requests: not judged."""

SEED_OF_TRACE = 1
"""Of the arrivals between two time stamps of the trace: recordings of equal rate are of equal requests."""


@dataclass(frozen=True)
class Wanted:
    """One part to run. `load` 1.0 is as much as the cores can do, by the cost model."""

    name: str
    load: float
    skip: int
    """Requests of the trace before those of this part."""
    ttft_limit_s: float
    tbt_limit_s: float = 0.5


PARTS = (
    Wanted("moderate", 0.65, 1000, 30.0),
    Wanted("overload", 1.8, 4000, 5.0),
)
"""Limits as by default; and one that a long queue breaks, but no prompt alone except the very longest."""


@dataclass(frozen=True)
class Choices:
    """What the command line can choose."""

    span_s: float = 130.0
    """Of each part."""
    record: Path | None = None
    """Where the recording goes."""


async def run(setup: Setup, choices: Choices) -> list[Row]:
    """Measure. Raises NotStarted or StreamFailed."""
    setup.open()
    recording = await record(setup, choices.span_s)
    if choices.record is not None:
        choices.record.write_text(json.dumps(recording.body()) + "\n", encoding="utf-8")
    with TemporaryDirectory() as folder:
        simulate = partial(truth.resimulated, recording, Path(folder), 1, _tell)
        return rows(await asyncio.to_thread(simulate))


async def record(setup: Setup, span_s: float) -> Recording:
    """Calibrate, then run all parts on the live service."""
    settings = settings_of(setup)
    _tell("calibrating")
    async with running(setup, *FLEET) as service, session() as http:
        cost = fitted(await probe(service, http, setup), setup, settings["chunk_tokens"])
    _tell(f"cost model: {json.dumps(body_of(cost))}")
    parts = [await _part(setup, cost, settings["block_tokens"], wanted, span_s) for wanted in PARTS]
    return Recording(machine_facts(), body_of(cost), settings, parts)


async def _part(setup: Setup, cost: CostModel, block_tokens: int, wanted: Wanted, span_s: float) -> Part:
    arrivals = workload(cost, block_tokens, wanted, span_s)
    _tell(f"{wanted.name}: {len(arrivals)} requests in {arrivals[-1].at_s:.0f} s")
    vocab = setup.open().tokenizer.vocab
    prompts = [prompt_of(arrival, block_tokens, vocab, setup.seed) for arrival in arrivals]
    async with running(setup, *FLEET) as service, session() as http:
        sent = await drive(http, service.url, arrivals, prompts, wanted)
        errors = {name: median_error(await service.histogram(http, name)) for name in ERROR_MAX}
    _tell(f"{wanted.name}: {sum(bool(one.refused) for one in sent)} refused")
    warm_up = int(WARM_SHARE * len(sent))
    return Part(wanted.name, wanted.ttft_limit_s, wanted.tbt_limit_s, warm_up, sent, errors)


async def drive(
    http: aiohttp.ClientSession,
    url: str,
    arrivals: Sequence[Arrival],
    prompts: Sequence[Sequence[int]],
    wanted: Wanted,
) -> list[Sent]:
    """Send each when it is due, however many have not ended yet. Raises StreamFailed if one neither ends nor is
    refused."""
    clock = asyncio.get_running_loop().time
    began, tasks = clock(), []
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        due = began + arrival.at_s
        await asyncio.sleep(due - clock())
        tasks.append(asyncio.create_task(_one(http, url, arrival, prompt, wanted, due)))
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _one(
    http: aiohttp.ClientSession, url: str, arrival: Arrival, prompt: Sequence[int], wanted: Wanted, due: float
) -> Sent:
    sent = Sent(arrival.at_s, arrival.tokens, arrival.output, arrival.blocks, None, None)
    limits = {"ttft_limit_s": wanted.ttft_limit_s, "tbt_limit_s": wanted.tbt_limit_s}
    try:
        seen = await stream_answer(http, url, prompt, arrival.output, **limits)
    except Refused as refused:
        return replace(sent, refused=str(refused))
    return replace(sent, ttft_s=seen.tokens_at[0] - due, tpot_s=seen.tpot_s)


# -- what is sent: pure -------------------------------------------------------------------------------


def workload(cost: CostModel, block_tokens: int, wanted: Wanted, span_s: float) -> list[Arrival]:
    """A slice of the conversation trace, scaled down, as fast as the part's load wants it."""
    whole = SimulatedSetup(skip=wanted.skip, spread=True, seed=SEED_OF_TRACE).arrivals()
    scaled = [scaled_down(arrival, block_tokens) for arrival in whole]
    chosen = scaled
    for _ in range(TURNS):
        rate = wanted.load * capacity(cost) * len(chosen) / work_s(chosen, cost, block_tokens)
        chosen = scaled[: max(round(rate * span_s), 2)]
    speed = rate * chosen[-1].at_s / (len(chosen) - 1)
    return [replace(arrival, at_s=arrival.at_s / speed) for arrival in chosen]


def scaled_down(arrival: Arrival, block_tokens: int) -> Arrival:
    """A prompt of as many blocks, each of fewer tokens; and a shorter answer."""
    tokens = -(-arrival.tokens * block_tokens // BLOCK_TOKENS)
    return replace(arrival, tokens=tokens, output=max(1, round(arrival.output * OUTPUTS_TIMES)))


def capacity(cost: CostModel) -> float:
    """Seconds of work, as of one instance alone, that the machine does in a second while all are busy."""
    return len(cost.speeds) * cost.speeds[-1]


def work_s(arrivals: Iterable[Arrival], cost: CostModel, block_tokens: int) -> float:
    """Seconds that instances compute for all of these, if whatever was seen before is still cached."""
    seen: set[int] = set()
    total_s = 0.0
    for arrival in arrivals:
        reused = 0
        while reused < (arrival.tokens - 1) // block_tokens and arrival.blocks[reused] in seen:
            reused += 1
        seen.update(arrival.blocks)
        prefix, context = reused * block_tokens, arrival.tokens + arrival.output / 2
        total_s += cost.request_s + cost.prefill_s(arrival.tokens - prefix, prefix)
        total_s += (arrival.output - 1) * cost.step_s(BATCH, BATCH * context) / BATCH
    return total_s


def prompt_of(arrival: Arrival, block_tokens: int, vocab: int, seed: int) -> list[int]:
    """Token ids: each block's are drawn from a generator of its own, so equal blocks are equal tokens."""
    ids: list[int] = []
    for block in arrival.blocks:
        dice = random.Random(f"{seed} {block}")
        ids += [dice.randrange(vocab) for _ in range(block_tokens)]
    return ids[: arrival.tokens]


def settings_of(setup: Setup) -> dict[str, Any]:
    """The service's settings as fields of a simulated setup: they are read as its instances will read them."""
    conductor = load_section(ConductorConfig, "conductor", environ=os.environ)
    decode = load_section(DecodeConfig, "decode", environ=os.environ)
    size = load_section(KVCacheConfig, "kvcache", environ=os.environ).size_bytes
    layout = setup.open().manifest.layout
    judged = (
        "placement",
        "balancing_threshold",
        "admission",
        "reserve",
        "hold",
        "residence_s",
        "margin",
        "hysteresis",
    )
    same = (*judged, "overtaken_max", "rescue_share", "rests_on_decode", "rest_steps_max", "report_s")
    return {
        **{name: getattr(conductor, name) for name in same},
        "z": conductor.reserve_z,
        "prefill": PREFILL,
        "decode": DECODE,
        "block_tokens": layout.block_tokens,
        "segment_tokens": size // layout.block_bytes * layout.block_tokens,
        "chunk_tokens": setup.prefill().chunk_tokens,
        "steps_max": decode.steps_max,
        "seed": setup.seed,
    }


def rows(report: dict[str, Any]) -> list[Row]:
    """Simulated figures against live ones, and how far they are off."""
    made = []
    for part, body in report["parts"].items():
        for line in body["figures"]:
            unit, times = ("", 1.0) if line["name"] == "refused" else ("ms", 1000.0)
            live, simulated = Spread.of([times * line["live"]]), Spread.of([times * line["simulated"]])
            made.append(Row(f"{part}: {line['name']}, simulated", unit, simulated, live if line["live"] else None))
            if line["within"] is not None:
                off = abs(line["simulated"] - line["live"]) / (line["live"] or 1.0)
                made.append(Row("  off by", "%", Spread.of([100 * off]), limit=100 * line["within"]))
        for name, error in body["errors"].items():
            made.append(Row(f"{part}: median error, {name}", "%", Spread.of([error]), limit=ERROR_MAX[name]))
    return made


def _tell(sentence: str) -> None:
    print(f"bench: {sentence}", file=sys.stderr, flush=True)
