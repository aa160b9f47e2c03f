"""Ten minutes of everything at once, or one: `make test ARGS="tests/kvcache_pool/test_soak.py --soak-s 600"`.

Each block's bytes are a function of its name, so that any wrong byte is found wherever it comes from.
`--soak-seed` draws other operations; the same seed draws the same.
"""

import asyncio
import gc
import logging
import random
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from kvcache_pool.segment import SHM, reclaim
from tests.kvcache_pool.flaky import FAST, FastLoop
from tests.kvcache_pool.soak_client import Tally, draw
from tests.kvcache_pool.soak_world import World

POOLS = ((1,), (4,), (4, 16), (24, 24, 32))
"""Slots of each segment of each pool: one block; four; a tiny one beside a larger; three."""

CLIENTS = 5
"""Of each pool."""


def files_of_ours() -> set[str]:
    return {path.name for path in SHM.glob("dango-*-soak-*")}


def test_one_seed_draws_the_same_operations() -> None:
    one, same, other = ([draw(rng, True) for _ in range(500)] for rng in map(random.Random, (1, 1, 2)))
    assert one == same != other


def test_pools_in_one_process(soak_s: float, soak_seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing lost, nothing wrong, and afterwards every gauge is where it was. Time runs FAST times as fast."""
    caplog.set_level(logging.CRITICAL, "dango")  # kept records would keep errors, and with them what they met
    reclaim()  # what runs before left, that were killed
    gc.collect()
    process = psutil.Process()
    files, open_files, threads = files_of_ours(), process.num_fds(), process.num_threads()

    async def soak(folder: Path) -> list[Tally]:
        worlds = [World(soak_seed, folder, slots, CLIENTS) for slots in POOLS]
        async with asyncio.TaskGroup() as tasks:
            for world in worlds:
                tasks.create_task(world.run(soak_s * FAST))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return [world.tally for world in worlds]

    with tempfile.TemporaryDirectory(prefix="dt-") as folder, asyncio.Runner(loop_factory=FastLoop) as runner:
        tallies = runner.run(soak(Path(folder)))
    for slots, tally in zip(POOLS, tallies, strict=True):
        sys.stdout.write(f"{slots}: {dict(sorted(tally.counts.items()))}\n")
    assert [tally.wrong for tally in tallies] == [[]] * len(POOLS)
    assert all(tally.counts["verified"] > soak_s and tally.troubles for tally in tallies)
    assert all(sum(tally.counts[what] for tally in tallies) for what in ("died", "late", "full", "unread"))
    assert files_of_ours() == files
    gc.collect()  # a mapping ends with the last array that views it, and errors hold some in their tracebacks
    assert process.num_fds() <= open_files
    assert process.num_threads() <= threads
