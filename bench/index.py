"""What the directory's index costs when it is large: time to find a prefix, and memory a block.

No service is started: the index is pure. It is filled as conversations fill it, in turns, in a process of its own
so that its memory can be told from everything else's.
"""

import gc
import hashlib
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.report import Row, Spread
from bench.setup import Setup
from kvcache_pool.api import Acquire, Place, new_lease
from kvcache_pool.index import Index
from kvcache_pool.slots import Shares
from protocol.blocks import BlockLayout
from protocol.ids import NO_TENANT, BlockHash, Incarnation, SegmentId, TenantId, tenant_id

ABOUT = "the directory's index with a million blocks: a lookup, a lease, and memory"

BLOCKS = 1_000_000
"""In the pool, all of them cached."""

PREFIX = 200
"""Blocks of a prompt, all of them cached."""

TURNS = 4
"""In so many each prompt has grown to its length, all prompts by turns: its blocks lie scattered."""

SEGMENTS = 4
"""Which share the blocks."""

TENANTS = 64
"""Whose the prompts are, by turns, where there are quotas; each has far less than its own."""

FIND_US_MAX = 100.0
"""Ten thousand lookups a second of index time, twice what the whole rpc should do."""

BLOCK_BYTES_MAX = 250.0
"""A block of even a small model is megabytes."""

FINDS = 500
"""Prompts that are found and leased in one run, drawn at random: most of them are in no cache of the processor."""

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=16, kv_type="bfloat16")
"""Any: no bytes are moved."""


class Cost(NamedTuple):
    """Of one run. Times are medians of what this process took, whatever others take of the machine."""

    find_us: float
    scattered_us: float
    """As many blocks of one segment of which no two are neighbours."""
    walk_us: float
    """The names are looked up one by one in a bare dict of as many: what memory alone takes for it."""
    lease_us: float
    """A prompt that is wholly cached is leased and released."""
    bytes: float
    """Resident memory that one block adds."""


async def run(setup: Setup) -> list[Row]:
    """Fill, ask, and weigh, as often as there are runs."""
    context = multiprocessing.get_context("spawn")
    costs: list[Cost] = []
    bounded: list[Cost] = []
    for seed in range(setup.seed, setup.seed + setup.runs):
        for quotas, into in ((False, costs), (True, bounded)):
            with ProcessPoolExecutor(1, mp_context=context) as process:
                into.append(process.submit(cost_of, BLOCKS, seed, quotas).result())
    return [
        Row(f"find {PREFIX} blocks of a million", "us", _spread(costs, "find_us"), limit=FIND_US_MAX),
        Row("  where no two are neighbours", "us", _spread(costs, "scattered_us")),
        Row("  as a walk through a bare dict", "us", _spread(costs, "walk_us")),
        Row(f"lease and release {PREFIX} blocks", "us", _spread(costs, "lease_us")),
        Row("  with quotas of tenants", "us", _spread(bounded, "lease_us")),
        Row("memory of the index", "bytes/block", _spread(costs, "bytes"), limit=BLOCK_BYTES_MAX),
        Row("  with quotas of tenants", "bytes/block", _spread(bounded, "bytes"), limit=BLOCK_BYTES_MAX),
    ]


def _spread(costs: Sequence[Cost], name: str) -> Spread:
    return Spread.of([getattr(cost, name) for cost in costs])


def cost_of(blocks: int, seed: int, quotas: bool = False) -> Cost:
    """Of an index with so many blocks, where tenants have quotas or not. To be called in a fresh process. Takes
    ten seconds for a million."""
    dice, prompts = random.Random(seed), blocks // PREFIX
    before = _resident_bytes()
    index = a_full_index(prompts, quotas)
    gc.collect()
    grown = _resident_bytes() - before
    finds, scattered, walks, leases = list[float](), list[float](), list[float](), list[float]()
    own = range(0, prompts, SEGMENTS)  # of the first segment
    for taken, chains in (
        (finds, [chain_of(dice.randrange(prompts)) for _ in range(FINDS)]),
        (scattered, [[name_of(dice.choice(own), at) for at in range(PREFIX)] for _ in range(FINDS)]),
    ):
        for chain in chains:
            began = time.process_time()
            found = index.find(chain)
            taken.append(time.process_time() - began)
            assert found.reach == PREFIX
    bare = {name: prompt for prompt in range(prompts) for name in chain_of(prompt)}
    for chain in [chain_of(dice.randrange(prompts)) for _ in range(FINDS)]:
        began = time.process_time()
        for name in chain:
            bare[name]
        walks.append(time.process_time() - began)
    for prompt in [dice.randrange(prompts) for _ in range(FINDS)]:
        ask = Acquire(new_lease(), "bench", chain_of(prompt), PREFIX, 0, None, tenant=_tenant(prompt, quotas))
        began = time.process_time()
        lease = index.acquire(ask, now=0.0)
        index.release(lease.lease)
        leases.append(time.process_time() - began)
        assert len(lease.sources) == PREFIX
    find_us, scattered_us, walk_us, lease_us = (
        1e6 * Spread.of(times).median for times in (finds, scattered, walks, leases)
    )
    return Cost(find_us, scattered_us, walk_us, lease_us, grown / (prompts * PREFIX))


def a_full_index(prompts: int, quotas: bool = False) -> Index:
    """Every slot has a block, of so many prompts, a multiple of SEGMENTS."""
    index = Index(Shares(tenant=0.5 if quotas else 1.0))
    segments = [SegmentId(f"kvcache-{number}") for number in range(SEGMENTS)]
    for segment in segments:
        place = Place(segment, Incarnation("1"), "", "", "", prompts * PREFIX // SEGMENTS, LAYOUT)
        index.announce(place, generation=0, now=0.0)
    for turn in range(1, TURNS + 1):
        for prompt in range(prompts):
            chain = chain_of(prompt)[: turn * PREFIX // TURNS]
            near, tenant = segments[prompt % SEGMENTS], _tenant(prompt, quotas)
            ask = Acquire(new_lease(), "bench", chain, PREFIX, 0, near, tenant=tenant)
            lease = index.acquire(ask, now=0.0)
            count = len(lease.targets)
            index.commit(lease.lease, list(range(count)), chain[-count:], now=0.0)
            index.release(lease.lease)
            _note_down(index, near)
    assert index.stats().cached == prompts * PREFIX
    return index


def _tenant(prompt: int, quotas: bool) -> TenantId:
    return tenant_id(f"tenant {prompt % TENANTS}") if quotas else NO_TENANT


def _note_down(index: Index, segment: SegmentId) -> None:
    """As a segment does with each announcement: what it has heard, the index need not keep."""
    news, number = index.news(segment, 0)
    while news:
        news, number = index.news(segment, number)


def chain_of(prompt: int) -> list[BlockHash]:
    """The names of a prompt's blocks, made anew as they come in a message."""
    return [name_of(prompt, block) for block in range(PREFIX)]


def name_of(prompt: int, block: int) -> BlockHash:
    """Any name."""
    return BlockHash(hashlib.sha256(b"%d %d" % (prompt, block)).digest())


def _resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
