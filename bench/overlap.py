"""How much of storing is seen: what is left of it when the first token is drawn, against storing it all then.

    layer by layer  compute ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓      after the fact  compute ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
                    store     ██ ██ ██ ██ ██ ██                      store                     ████████████
                    seen                      ├┤                     seen                      ├──────────┤

The first is what the service's prefill instance reports. The second is the same mover writing the same
number of bytes of the same engine into a segment of its own, layer after layer, while nothing computes.
"""

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.client import session, stream_answer
from bench.engine import BareEngine, bare_engine
from bench.report import Row, Spread
from bench.service import running
from bench.setup import Setup, random_prompt
from kvcache_pool.announcing import place_of
from kvcache_pool.api import Grant, Priority
from kvcache_pool.geometry import Geometry
from kvcache_pool.segment import Segment
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.ids import SegmentId
from protocol.instance import new_incarnation
from protocol.zmq_transport import ZmqTransport

ABOUT = "store time that a 2,048-token prefill shows, against storing the same KV after it"

PROMPT = 2048
SEEN_MAX = 0.1
SEEN_S = "dango:request_store_wait_time_seconds"

REST_S = 0.3
"""For the service to be idle when the engine alone is measured."""

HOST = "here"


async def run(setup: Setup) -> list[Row]:
    """Measure. Raises NotStarted or StreamFailed."""
    dice, vocab = setup.dice(), setup.open().tokenizer.vocab
    seen, after = [], []
    async with running(setup) as service, bare_engine(setup) as engine, session() as http:
        for number in range(setup.runs + 1):
            before_s = await service.metric(http, f"{SEEN_S}_sum")
            await stream_answer(http, service.url, random_prompt(dice, PROMPT, vocab), 1)
            seen_s = await service.metric(http, f"{SEEN_S}_sum") - before_s
            await asyncio.sleep(REST_S)
            after_s = await _after_the_fact_s(engine, dice, vocab)
            if number > 0:  # the first is slower
                seen.append(1000 * seen_s)
                after.append(1000 * after_s)
    return [Row(f"visible store, {PROMPT:,} tokens", "ms", Spread.of(seen), Spread.of(after), SEEN_MAX)]


async def _after_the_fact_s(engine: BareEngine, dice: random.Random, vocab: int) -> float:
    layers, pages = await engine.kv_of(random_prompt(dice, PROMPT, vocab))
    transport = ZmqTransport()
    try:
        mover = PoolMover(transport, HOST, Reach.SHM)
        try:
            segment = Segment(SegmentId("bench"), new_incarnation(), Geometry(engine.layout, len(pages)))
            try:
                return await _store_s(mover, segment, layers, pages)
            finally:
                segment.close()
        finally:
            await mover.aclose()
    finally:
        transport.close()


async def _store_s(
    mover: PoolMover, segment: Segment, layers: Sequence[npt.NDArray[np.uint8]], pages: Sequence[int]
) -> float:
    """Into slots that were never written, as those are that the service's first prompts get."""
    clock = asyncio.get_running_loop().time
    mover.know([place_of(segment, "", HOST)])
    grants = [Grant(segment.segment, slot, 1) for slot in range(len(pages))]
    began = clock()
    for layer, runs in enumerate(layers):
        await mover.write(layer, grants, runs, pages, Priority.STORE)
    return clock() - began
