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
from protocol.blocks import BlockLayout

ABOUT = "loading a prefix layer by layer against whole blocks at once"

BLOCKS = (1, 4, 16, 64)
LARGE_BLOCKS = (1, 4, 8, 16)
SLOTS = 512
LARGE_SLOTS = 96
ROUNDS = 20
LARGE = BlockLayout(layers=32, kv_heads=8, head_dim=128, block_tokens=16, kv_type="bfloat16")
"""As models of 8 billion parameters have them: runs of 64 KiB, blocks of 2 MiB."""
WAYS = {"shared memory": Reach.SHM, "TCP": Reach.TCP}


async def run(runs: int) -> list[Row]:
    """Measure. Raises PoolFailed."""
    rows = await _run(SMOLLM, SLOTS, BLOCKS, "blocks", runs)
    return rows + await _run(LARGE, LARGE_SLOTS, LARGE_BLOCKS, "large blocks", runs)


async def _run(layout: BlockLayout, slots: int, counts: Sequence[int], what: str, runs: int) -> list[Row]:
    rows: list[Row] = []
    async with pool(layout, slots) as running:
        lease = await running.lease([], unnamed=slots)
        pages = np.full((layout.layers, slots, layout.run_bytes), 1, np.uint8)
        for way, reach in WAYS.items():
            mover = PoolMover(running.transport, HOST, reach)
            mover.know(lease.places)
            try:
                for layer in range(layout.layers):
                    await mover.write(layer, lease.targets, pages[layer], range(slots), Priority.STORE)
                for blocks in counts:
                    samples = Samples()
                    for _ in range(runs):
                        await samples.turns(max(3, ROUNDS // blocks), _things(mover, lease.targets, pages, blocks))
                    rows += _rows(samples, f"{blocks} {what}, {way}")
            finally:
                await mover.aclose()
    return rows


def _rows(samples: Samples, name: str) -> list[Row]:
    return [
        samples.row(f"{name}: in bulk, against all layers one by one", "bulk", "layers"),
        samples.row(f"{name}: in bulk, against one layer", "bulk", "layer"),
    ]


def _things(mover: Mover, grants: Sequence[Grant], pages: Bytes, blocks: int) -> dict[str, Timed]:
    depth, slots, _ = pages.shape

    def part(number: int) -> slice:
        start = number * blocks % (slots - blocks + 1)
        return slice(start, start + blocks)

    async def read(layer: int, at: slice) -> None:
        rows = range(at.start, at.stop)
        assert await mover.read(layer, grants[at], pages[layer], rows, Priority.LOAD) == blocks

    async def bulk(number: int) -> None:
        at = part(number)
        into = [pages[:, page] for page in range(at.start, at.stop)]
        assert await mover.read_blocks(grants[at], into, Priority.LOAD) == blocks

    async def layers(number: int) -> None:
        for layer in range(depth):
            await read(layer, part(number))

    async def layer(number: int) -> None:
        await read(number % depth, part(number))

    return {"bulk": bulk, "layers": layers, "layer": layer}
