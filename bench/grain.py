"""Layer by layer, or whole blocks at once: what it takes to load a prefix of so many blocks into pages.

    layer by layer   computing begins when the first layer is there; a transfer for each layer
    in bulk          computing begins when all of it is there; one transfer

With r for one layer, b for the bulk, and c for what the engine computes in a layer: layer by layer, the last layer
can begin after max(30 r, r + 29 c), in bulk after b + 29 c. So bulk is better where `b < r`, whatever is computed;
and where little is computed (`c < r`) already where `b + 29 c < 30 r`. The rows give b against 30 r and against r.
"""

from collections.abc import Sequence

import numpy as np

from bench.objects import SMOLLM, Bytes, Samples, Timed
from bench.pool import HOST, pool
from bench.report import Row
from kvcache_pool.api import Grant, Mover, Priority
from kvcache_pool.transfer.mover import PoolMover, Reach

ABOUT = "loading a prefix layer by layer against whole blocks at once"

BLOCKS = (1, 4, 16, 64)
SLOTS = 512
ROUNDS = 20
WAYS = {"shared memory": Reach.SHM, "TCP": Reach.TCP}


async def run(runs: int) -> list[Row]:
    """Measure. Raises PoolFailed."""
    rows: list[Row] = []
    async with pool(SMOLLM, SLOTS) as running:
        lease = await running.lease([], unnamed=SLOTS)
        pages = np.full((SMOLLM.layers, SLOTS, SMOLLM.run_bytes), 1, np.uint8)
        for way, reach in WAYS.items():
            mover = PoolMover(running.transport, HOST, reach)
            mover.know(lease.places)
            try:
                for layer in range(SMOLLM.layers):
                    await mover.write(layer, lease.targets, pages[layer], range(SLOTS), Priority.STORE)
                for blocks in BLOCKS:
                    rows += await _rows(mover, lease.targets, pages, way, blocks, runs)
            finally:
                await mover.aclose()
    return rows


async def _rows(
    mover: Mover, grants: Sequence[Grant], pages: Bytes, way: str, blocks: int, runs: int
) -> list[Row]:
    samples = Samples()
    for _ in range(runs):
        await samples.turns(max(3, ROUNDS // blocks), _things(mover, grants, pages, blocks))
    name = f"{blocks} blocks, {way}"
    return [
        samples.row(f"{name}: in bulk, against all layers one by one", "bulk", "layers"),
        samples.row(f"{name}: in bulk, against one layer", "bulk", "layer"),
    ]


def _things(mover: Mover, grants: Sequence[Grant], pages: Bytes, blocks: int) -> dict[str, Timed]:
    def part(number: int) -> slice:
        start = number * blocks % (SLOTS - blocks + 1)
        return slice(start, start + blocks)

    async def read(layer: int, at: slice) -> None:
        rows = range(at.start, at.stop)
        assert await mover.read(layer, grants[at], pages[layer], rows, Priority.LOAD) == blocks

    async def bulk(number: int) -> None:
        at = part(number)
        into = [pages[:, page] for page in range(at.start, at.stop)]
        assert await mover.read_blocks(grants[at], into, Priority.LOAD) == blocks

    async def layers(number: int) -> None:
        for layer in range(SMOLLM.layers):
            await read(layer, part(number))

    async def layer(number: int) -> None:
        await read(number % SMOLLM.layers, part(number))

    return {"bulk": bulk, "layers": layers, "layer": layer}
