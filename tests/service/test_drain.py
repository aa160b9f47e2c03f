"""A KVCache instance is taken out of a running cluster: what it had is found, and the text is the same."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvcache_pool.api import ANNOUNCE_EVERY_S, Acquire, new_lease
from kvcache_pool.client import KVCachePool
from tests.engine.referee import a_prompt
from tests.service.by_hand import ByHand
from tests.service.client import REPORTS_S, cached, text_of
from tests.service.processes import READY_S, ROOT, until

pytestmark = pytest.mark.cluster

OUT, STAYS = "kvcache-0", "kvcache-9"
"""The first by name is the home of the only prefill instance; the other keeps the directory."""
TOKENS = 8
CACHED = 64
BLOCKS = CACHED // 16


def start(cluster: ByHand, name: str, *flags: str, size: str = "4MiB") -> None:
    at = ("--instance", name, "--listen", f"ipc://{cluster.folder}/{name}", "--conductor", cluster.control)
    cluster.start("kvcache", name, *at, "--size-bytes", size, *flags)


@contextmanager
def a_cluster(tiny: Path, stays: str = "4MiB") -> Iterator[ByHand]:
    with ByHand(tiny) as cluster:
        cluster.conductor()
        start(cluster, STAYS, size=stays)
        start(cluster, OUT, "--no-directory")
        cluster.compute("prefill", "prefill-0")
        cluster.compute("decode", "decode-0")
        cluster.until_up(prefill=1, decode=1, kvcache=2)
        time.sleep(2 * REPORTS_S)  # until the prefill instance has reported once more, its home may be the other
        yield cluster


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[ByHand]:
    with a_cluster(tiny) as cluster:
        yield cluster


def drain(cluster: ByHand, wait_s: float) -> tuple[int, str]:
    """The verb's exit code, and what it says."""
    argv = [sys.executable, "-m", "deploy.cli", "kvcache", "drain", OUT, "--conductor", cluster.control]
    done = subprocess.run(
        [*argv, "--wait", str(wait_s)], cwd=ROOT, capture_output=True, text=True, timeout=wait_s + 60
    )
    return done.returncode, done.stdout


@asynccontextmanager
async def reading(cluster: ByHand, prompt: list[int]) -> AsyncIterator[KVCachePool]:
    """Somebody holds a lease on what is cached of a prompt, in the segment that is to go."""
    async with KVCachePool.connect(cluster.control) as pool, pool._guide.directory() as directory:
        names = pool.names(prompt)
        ask = Acquire(new_lease(), "test", names, len(names), 0, None)
        lease = await directory.acquire(ask)
        try:
            assert {grant.segment for grant in lease.sources} == {OUT}
            yield pool
        finally:
            await directory.release(ask.lease)


async def test_prompts_are_served_during_a_drain_and_all_is_cached_after_the_stop(cluster: ByHand) -> None:
    prompts = [a_prompt(70, seed=seed) for seed in range(40, 46)]
    said = [text_of(cluster.client.complete(prompt, TOKENS)) for prompt in prompts]
    cluster.client.at_rest()
    async with reading(cluster, prompts[0]) as pool:
        for prompt in prompts:
            assert (await pool.lookup(prompt)).segments == {OUT: BLOCKS}
        left = f"{OUT} is not drained: blocks left: {BLOCKS} ({BLOCKS} in use)\n"
        until(lambda: drain(cluster, 2.0) == (1, left), READY_S)
        assert (await pool.lookup(prompts[0])).segments == {OUT: BLOCKS, STAYS: BLOCKS}
        fresh = a_prompt(70, seed=46)
        during = cluster.client.complete(fresh, TOKENS)
        assert (await pool.lookup(fresh)).segments == {STAYS: BLOCKS}
        for prompt, text in zip(prompts, said, strict=True):
            warm = cluster.client.complete(prompt, TOKENS)
            assert (cached(warm), text_of(warm)) == (CACHED, text)
    assert drain(cluster, 60.0) == (0, f"{OUT} is drained: its process may be stopped\n")
    assert cluster.client.at_rest()["dango:draining_segments"] == 1
    cluster.stop(OUT)
    cluster.until_up(kvcache=1)
    for prompt, text in zip([*prompts, fresh], [*said, text_of(during)], strict=True):
        after = cluster.client.complete(prompt, TOKENS)
        assert (cached(after), text_of(after)) == (CACHED, text)
    assert cluster.client.at_rest()["dango:draining_segments"] == 0


async def test_a_drain_survives_the_death_of_the_segments_owner(cluster: ByHand) -> None:
    if OUT not in cluster.programs:
        start(cluster, OUT, "--no-directory")
        cluster.until_up(prefill=1, decode=1, kvcache=2)
    await asyncio.sleep(3 * ANNOUNCE_EVERY_S)  # its first report and the prefill instance's next
    prompts = [a_prompt(70, seed=seed) for seed in range(50, 54)]
    said = [text_of(cluster.client.complete(prompt, TOKENS)) for prompt in prompts]
    cluster.client.at_rest()
    await asyncio.sleep(2 * ANNOUNCE_EVERY_S)  # all is noted
    async with reading(cluster, prompts[0]):
        assert drain(cluster, 1.0)[0] == 1
        cluster.kill(OUT, leave_memory=True)
        start(cluster, OUT, "--no-directory")
        cluster.until_up(prefill=1, decode=1, kvcache=2)
    assert drain(cluster, 60.0)[0] == 0
    cluster.stop(OUT)
    cluster.until_up(kvcache=1)
    for prompt, text in zip(prompts, said, strict=True):
        after = cluster.client.complete(prompt, TOKENS)
        assert (cached(after), text_of(after)) == (CACHED, text)


def test_what_does_not_fit_is_what_was_used_longest_ago(tiny: Path) -> None:
    with a_cluster(tiny, stays="300KiB") as cluster:  # about twenty blocks
        prompts = [a_prompt(70, seed=seed) for seed in range(60, 68)]
        said = [text_of(cluster.client.complete(prompt, 1)) for prompt in prompts]
        cluster.client.at_rest()
        assert drain(cluster, 60.0)[0] == 0
        cluster.stop(OUT)
        cluster.until_up(kvcache=1)
        answers = [cluster.client.complete(prompt, 1) for prompt in reversed(prompts)]
        assert [text_of(answer) for answer in answers] == said[::-1]
        found = [cached(answer) for answer in answers]
        assert found[:4] == [CACHED] * 4, found
        assert found[-1] < CACHED, found
