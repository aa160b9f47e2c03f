"""Processes that come and go around a pool that stays, and processes that do not fit."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache_pool.api import ANNOUNCE_EVERY_S
from kvcache_pool.client import KVCachePool
from tests.engine.referee import a_prompt
from tests.service.by_hand import ByHand
from tests.service.client import cached, text_of
from tests.service.processes import READY_S, until
from tests.tiny import tiny_model

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[ByHand]:
    """One of each. Every process has another seed for Python's own hashes."""
    with ByHand(tiny) as cluster:
        cluster.conductor(PYTHONHASHSEED="1")
        cluster.kvcache(PYTHONHASHSEED="2")
        cluster.compute("prefill", "prefill-0", PYTHONHASHSEED="3")
        cluster.compute("decode", "decode-0", PYTHONHASHSEED="4")
        cluster.until_up(prefill=1, decode=1, kvcache=1)
        yield cluster


PROMPT = a_prompt(70, seed=1)
CACHED = 64
TOKENS = 30
LONG = a_prompt(1003, seed=2)
"""So long that any estimate has it fetched from a disk sooner than computed."""


def used(cluster: ByHand) -> float:
    return cluster.client.at_rest()["dango:blocks/kvcache/used"]


def saved(cluster: ByHand) -> int:
    """Blocks on disks."""

    async def ask() -> int:
        async with KVCachePool.connect(cluster.control) as pool:
            return (await pool.stats()).disk_cached

    return asyncio.run(ask())


def test_a_block_has_one_name_in_every_process(cluster: ByHand) -> None:
    """B24"""
    cold = cluster.client.complete(PROMPT, TOKENS)
    assert cached(cold) == 0
    stored = used(cluster)
    assert stored == (len(PROMPT) + TOKENS - 1) // 16

    cluster.compute("prefill", "prefill-1", PYTHONHASHSEED="5")
    cluster.until_up(prefill=2)
    cluster.kill("prefill-0")
    cluster.until_up(prefill=1)
    through_another = cluster.client.complete(PROMPT, TOKENS)
    assert cached(through_another) == CACHED
    assert text_of(through_another) == text_of(cold)
    assert used(cluster) == stored

    cluster.stop("prefill-1", "decode-0", "conductor")
    cluster.conductor(PYTHONHASHSEED="6")
    cluster.compute("prefill", "prefill-0", PYTHONHASHSEED="7")
    cluster.compute("decode", "decode-0", PYTHONHASHSEED="8")
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    after_all = cluster.client.complete(PROMPT, TOKENS)
    assert cached(after_all) == CACHED
    assert text_of(after_all) == text_of(cold)
    assert used(cluster) == stored


def test_a_new_pool_is_cold_and_gives_the_same_text(cluster: ByHand) -> None:
    before = cluster.client.complete(PROMPT, TOKENS)
    cluster.kill("kvcache-0")
    cluster.kvcache(PYTHONHASHSEED="9")
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    after = cluster.client.complete(PROMPT, TOKENS)
    assert text_of(after) == text_of(before)
    assert cached(after) == 0
    assert cached(cluster.client.complete(PROMPT, TOKENS)) == CACHED


def test_a_killed_pool_is_warm_again(cluster: ByHand) -> None:
    """And so is a whole cluster, killed at once."""
    before = cluster.client.complete(PROMPT, TOKENS)
    stored = used(cluster)
    time.sleep(2 * ANNOUNCE_EVERY_S)  # what was stored last has been noted
    cluster.kill("kvcache-0", leave_memory=True)
    cluster.kvcache(PYTHONHASHSEED="10")
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    after = cluster.client.complete(PROMPT, TOKENS)
    assert (cached(after), text_of(after)) == (CACHED, text_of(before))
    assert used(cluster) == stored

    for name in [*cluster.programs]:
        cluster.kill(name, leave_memory=True)
    cluster.conductor()
    cluster.kvcache()
    cluster.compute("prefill", "prefill-0")
    cluster.compute("decode", "decode-0")
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    after_all = cluster.client.complete(PROMPT, TOKENS)
    assert (cached(after_all), text_of(after_all)) == (CACHED, text_of(before))
    assert used(cluster) == stored


def test_the_disk_tier_survives_what_memory_does_not(cluster: ByHand, tmp_path: Path) -> None:
    disk = ("--disk-path", str(tmp_path / "disk"), "--disk-bytes", "16MiB")
    cluster.kill("kvcache-0")
    cluster.kvcache(*disk)
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    kept = len(LONG) // 16 * 16
    before = cluster.client.complete(LONG, TOKENS)
    blocks = (len(LONG) + TOKENS - 1) // 16
    until(lambda: saved(cluster) == blocks, READY_S)
    time.sleep(4 * ANNOUNCE_EVERY_S)  # noted
    for name in [*cluster.programs]:
        cluster.kill(name)
    cluster.conductor()
    cluster.kvcache(*disk)
    cluster.compute("prefill", "prefill-0")
    cluster.compute("decode", "decode-0")
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    until(lambda: saved(cluster) == blocks, READY_S)
    assert used(cluster) == 0
    for times_read in (1, 2, 3):
        after = cluster.client.complete(LONG, TOKENS)
        assert (cached(after), text_of(after)) == (kept, text_of(before)), times_read
    until(lambda: used(cluster) >= kept / 16, READY_S)  # what is used twice is in memory again
    assert used(cluster) <= blocks


def test_an_instance_that_does_not_fit_is_told_why_and_ends(cluster: ByHand, tmp_path: Path) -> None:
    """B26: the field and both values; the rest serves on."""
    other = tiny_model(tmp_path / "other", seed=1)
    deeper = tiny_model(tmp_path / "deeper", num_hidden_layers=4)
    before = cluster.client.complete(PROMPT, TOKENS)
    unfit = {
        "block_tokens is 8, but this cluster has 16": cluster.compute("prefill", "x0", "--block-tokens", "8"),
        "kv_type is 'bfloat16', but this cluster has 'float32'": cluster.compute(
            "decode", "x1", "--dtype", "bfloat16"
        ),
        "layers is 4, but this cluster has 3": cluster.compute("decode", "x2", model=deeper),
        "context_tokens is 1024, but this cluster has 2048": cluster.compute(
            "prefill", "x3", "--context-tokens", "1024"
        ),
        "model_digest is ": cluster.compute("prefill", "x4", model=other),
    }
    for reason, program in unfit.items():
        assert program.ended(READY_S) == 1
        assert reason in program.said()
        assert "Traceback" not in program.said()
    for name in ("x0", "x1", "x2", "x3", "x4"):
        del cluster.programs[name]
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    assert text_of(cluster.client.complete(PROMPT, TOKENS)) == text_of(before)
