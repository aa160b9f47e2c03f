"""B31: layers that land late, not at all, or twice. The text is the one foretold; only time is lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from protocol.blocks import block_hashes
from tests.cluster import Cluster, a_cluster, an_ask
from tests.fakes import LAYOUT, MANIFEST, foretell
from tests.kvcache_pool.faults import Faults, FaultyMover

LATE_S = 0.05
PREFIX = [(5 * i) % 89 for i in range(60)]
PROMPTS = [[*PREFIX, n, n + 1, n + 2] for n in range(8)]


@asynccontextmanager
async def a_faulty_cluster(prefill: Faults, decode: Faults) -> AsyncIterator[Cluster]:
    """One of each; the pool holds PREFIX, put there before anything could go wrong."""
    async with a_cluster(prefills=0, decodes=0) as cluster:
        cluster.start_prefill("prefill-0")
        cluster.start_decode("decode-0")
        await cluster.ready(3)
        await cluster.serve(an_ask(PREFIX, 1))
        await cluster.kill("prefill-0")
        await cluster.kill("decode-0")
        await cluster.ready(1)
        cluster.start_prefill("prefill-1", mover=FaultyMover(cluster._mover(), prefill))
        cluster.start_decode("decode-1", mover=FaultyMover(cluster._mover(), decode))
        await cluster.ready(3)
        yield cluster


async def serve_all(cluster: Cluster, prompts: Sequence[list[int]] = PROMPTS) -> list[int]:
    """Eight long prompts at once; asserts their texts. Returns how much of each was reused."""
    replies = await asyncio.gather(*(cluster.serve(an_ask(prompt, 9)) for prompt in prompts))
    assert [reply.said[0] for reply in replies] == [foretell(prompt, 9) for prompt in prompts]
    await cluster.at_rest()
    return [reply.reused[0] for reply in replies]


@pytest.mark.parametrize("layer", range(LAYOUT.layers))
async def test_a_layer_of_the_prefix_that_lands_late_is_waited_for(layer: int):
    late = Faults(read_delay_s={layer: LATE_S})
    async with a_faulty_cluster(late, Faults()) as cluster:
        assert await serve_all(cluster) == [60] * 8


@pytest.mark.parametrize("layer", range(LAYOUT.layers))
async def test_a_layer_that_is_stored_late_is_waited_for(layer: int):
    late = Faults(write_delay_s={layer: LATE_S})
    async with a_faulty_cluster(late, Faults()) as cluster:
        await serve_all(cluster)


@pytest.mark.parametrize("layer", range(LAYOUT.layers))
async def test_a_layer_that_the_decode_instance_gets_late_is_waited_for(layer: int):
    late = Faults(read_delay_s={layer: LATE_S})
    async with a_faulty_cluster(Faults(), late) as cluster:
        await serve_all(cluster)


@pytest.mark.parametrize("good", [0, 7, 14])
@pytest.mark.parametrize("read", range(LAYOUT.layers))
async def test_a_layer_of_the_prefix_that_is_lost_is_computed_again(read: int, good: int):
    """The request is sent back, the bad block forgotten, and the second try uses what is before it."""
    lost = Faults(short_reads={read: good})
    async with a_faulty_cluster(lost, Faults()) as cluster:
        assert await serve_all(cluster, PROMPTS[:1]) == [4 * good]


@pytest.mark.parametrize("good", [0, 7, 15])
@pytest.mark.parametrize("read", range(LAYOUT.layers))
async def test_a_layer_that_the_decode_instance_loses_is_computed_there(read: int, good: int):
    lost = Faults(short_reads={read: good})
    async with a_faulty_cluster(Faults(), lost) as cluster:
        assert await serve_all(cluster, PROMPTS[:1]) == [60]


async def test_a_layer_that_is_stored_twice_is_the_same_layer():
    twice = Faults(repeated_writes=frozenset(range(1, 200, 2)))
    async with a_faulty_cluster(twice, Faults()) as cluster:
        await serve_all(cluster)


@pytest.mark.parametrize("write", range(LAYOUT.layers))
async def test_a_layer_that_cannot_be_stored_is_stored_at_the_second_try(write: int):
    failing = Faults(failed_writes=frozenset([write]))
    async with a_faulty_cluster(failing, Faults()) as cluster:
        await serve_all(cluster, PROMPTS[:1])


async def test_a_hot_prefix_spreads_to_the_home_of_who_fetches_it():
    """Eight prompts that share it and have much more to compute: too many for the instance that has it at home."""
    prompts = [[*PREFIX, *(n + i for i in range(60))] for n in range(8)]
    async with a_cluster(prefills=2, segments=2, layer_s=0.01) as cluster:
        await cluster.serve(an_ask(PREFIX, 1))
        while (await cluster.at_rest()).total < 512:  # noqa: ASYNC110 - until the second segment has joined
            await asyncio.sleep(0.01)
        assert await serve_all(cluster, prompts) == [60] * 8
        names = block_hashes(MANIFEST.root(), PREFIX)
        assert (await cluster.directory.get().lookup(names)).held == {"kvcache-0": 15, "kvcache-1": 15}
        assert (await cluster.stats()).copies == 15
