"""One client of a soaked pool, as a program of its own: given a Conductor's address, a seed, its host and reach.

It stops at SIGTERM. What is wrong goes to standard error when it is found, for it may be killed at any moment; and
what it has done, as JSON, to standard output when it stops.
"""

import asyncio
import json
import random
import signal
import sys
from collections import Counter

import numpy as np

from kvcache_pool.api import PoolFull
from kvcache_pool.client import KVCachePool
from kvcache_pool.segment import Bytes
from protocol.errors import DangoError
from protocol.ids import BlockHash
from tests.kvcache_pool.builders import LAYOUT
from tests.kvcache_pool.soak_client import bytes_of, chain

WRONG = "WRONG"


class Program:
    def __init__(self, seed: str, host: str, reach: str) -> None:
        self.rng = random.Random(seed)
        self.host = host
        self.reach = reach
        self.counts: Counter[str] = Counter()
        self.over = False

    async def run(self, conductor: str) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        while not self.over:
            try:
                async with KVCachePool.connect(conductor, host=self.host, reach=self.reach) as pool:
                    while not self.over:
                        await self.turn(pool)
            except DangoError as error:  # the pool may be away for a while
                self.counts[f"connect: {type(error).__name__}"] += 1
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        self.over = True

    async def turn(self, pool: KVCachePool) -> None:
        path = [self.rng.choice((0, 0, 0, 1, 1, 2, self.rng.randrange(8))) for _ in range(self.rng.randint(1, 7))]
        what = self.rng.choices(
            ("put", "get", "get_into", "ask", "pin", "remove", "clear"), (40, 25, 25, 5, 3, 2, 0.1)
        )[0]
        try:
            await self.do(pool, what, chain(path))
            self.counts[what] += 1
        except PoolFull:
            self.counts["full"] += 1
            await asyncio.sleep(0.01)
        except DangoError as error:
            self.counts[f"{what}: {type(error).__name__}"] += 1
            await asyncio.sleep(0.02)

    async def do(self, pool: KVCachePool, what: str, names: list[BlockHash]) -> None:
        if what == "put":
            await pool.put(names, [bytes_of(name) for name in names])
        elif what == "get":
            self.verify(names, await pool.get(names), what)
        elif what == "get_into":
            out = np.full((len(names), LAYOUT.layers, LAYOUT.run_bytes), 0xEE, np.uint8)
            self.verify(names, out[: await pool.get_into(names, out)], what)
        elif what == "ask":
            found = await pool.lookup(names)
            if not all(count <= found.blocks <= len(names) for count in found.segments.values()):
                self.wrong(f"found {found} of {len(names)}")
            await pool.stats()
        elif what == "pin":
            await pool.pin(names, 2.0, hard=self.rng.random() < 0.5)
        elif what == "remove":
            await pool.remove(names[-1:])
        else:
            await pool.clear()

    def verify(self, names: list[BlockHash], blocks: Bytes, what: str) -> None:
        for name, block in zip(names, blocks, strict=False):
            if not np.array_equal(block, bytes_of(name)):
                self.wrong(f"bytes of {name.hex()[:8]}, by {what} over {self.reach}")
        self.counts["verified"] += len(blocks)

    def wrong(self, text: str) -> None:
        sys.stderr.write(f"{WRONG}: {text}\n")
        sys.stderr.flush()


def main() -> None:
    conductor, seed, host, reach = sys.argv[1:]
    program = Program(seed, host, reach)
    asyncio.run(program.run(conductor))
    sys.stdout.write(json.dumps(program.counts))


if __name__ == "__main__":
    main()
