"""A prefill instance over a fake engine and pool: the text foretold, whatever loads, fails or leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.api import Sampling
from kvcache_pool.api import Copy, Corrupt, Directory, DirectoryLink, Grant, LeaseLost, NotFinite, Stale
from prefill_pool.api import Prefill, PrefillBusy, PrefixLost, StoreLost
from prefill_pool.config import PrefillConfig
from prefill_pool.service import PrefillService
from protocol.blocks import block_hashes
from protocol.errors import BadMessage, PeerLost
from protocol.ids import BlockHash, Ids, LeaseId, RequestId, SegmentId, token_ids
from protocol.rpc import Ask
from tests.fakes import LAYOUT, MANIFEST, FakeEngine, MemoryMover, foretell

SEGMENT = SegmentId("kvcache-0")
PROMPT = [(7 * i) % 97 for i in range(22)]  # five full blocks of four, and a tail of two


class NoDirectory(Directory):
    """Takes commits and discards, and remembers them."""

    def __init__(self) -> None:
        self.committed: list[BlockHash] = []
        self.slots: list[int] = []
        """What was committed, as the lease counts it."""
        self.discarded: list[Grant] = []
        self.told: list[tuple[list[int], BlockHash | None]] = []
        """The tokens of each commit, and the name before its blocks."""

    async def commit(
        self,
        lease: LeaseId,
        slots: list[int],
        blocks: list[BlockHash],
        tokens: Ids | None = None,
        parent: BlockHash | None = None,
    ) -> None:
        assert len(slots) == len(blocks)
        self.told.append(([*(tokens or ())], parent))
        self.slots += slots
        self.committed += blocks

    async def discard(self, grants: list[Grant]) -> None:
        self.discarded += grants


class FixedLink(DirectoryLink):
    def __init__(self, directory: Directory) -> None:
        self._fixed = directory

    def get(self) -> Directory:
        return self._fixed

    async def follow(self, address: str | None) -> None:
        assert address == "tcp://directory"


class Bench:
    """One instance and what it stands on."""

    def __init__(self, engine: FakeEngine, mover: MemoryMover, queue_max: int) -> None:
        self.engine, self.mover, self.directory = engine, mover, NoDirectory()
        config = PrefillConfig(block_tokens=4, chunk_tokens=8, queue_max=queue_max)
        self.service = PrefillService(engine, self.mover, FixedLink(self.directory), config)

    async def prefill(self, message: Prefill) -> list[int]:
        done = await self.service.prefill(message, an_ask())
        assert done.reused_tokens == len(message.sources) * LAYOUT.block_tokens
        return [sampled.token for sampled in done.first]


@asynccontextmanager
async def a_bench(
    engine: FakeEngine | None = None, mover: MemoryMover | None = None, queue_max: int = 4
) -> AsyncIterator[Bench]:
    bench = Bench(engine or FakeEngine(), mover or MemoryMover(), queue_max)
    steps = asyncio.create_task(bench.service.step_forever())
    yield bench
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    bench.service.check()
    assert bench.service.load().blocks_free == bench.engine.pages


def an_ask() -> Ask:
    async def send(*_: object) -> None:
        raise AssertionError("a prefill sends no items")

    return Ask([], 10.0, send)


def a_prefill(prompt: list[int], reuse: int = 0, name: str = "r", choices: int = 1) -> Prefill:
    names = block_hashes(MANIFEST.root(), prompt)
    grants = [Grant(SEGMENT, slot, 1) for slot in range(-(-len(prompt) // LAYOUT.block_tokens))]
    return Prefill(
        RequestId(name),
        token_ids(prompt),
        len(prompt),
        names,
        "tcp://directory",
        LeaseId("lease"),
        grants[:reuse],
        grants[reuse:],
        [],
        [Sampling(seed=seed) for seed in range(choices)],
    )


async def test_tokens_are_told_with_each_commit_where_they_are_wanted_and_nowhere_else():
    blocks = block_hashes(MANIFEST.root(), PROMPT)
    async with a_bench() as bench:
        await bench.prefill(replace(a_prefill(PROMPT), wants_tokens=True))
        assert bench.directory.told == [(PROMPT[:8], None), (PROMPT[8:16], blocks[1]), (PROMPT[16:20], blocks[3])]
        bench.directory.told.clear()
        await bench.prefill(a_prefill(PROMPT, reuse=2))
        assert {*map(str, bench.directory.told)} == {"([], None)"}


async def test_cold_then_warm_give_the_same_token_and_warm_computes_only_the_rest():
    async with a_bench() as bench:
        assert await bench.prefill(a_prefill(PROMPT)) == foretell(PROMPT, 1)
        assert bench.directory.committed == block_hashes(MANIFEST.root(), PROMPT)
        assert bench.engine.tokens_computed == len(PROMPT)
        assert await bench.prefill(a_prefill(PROMPT, reuse=5)) == foretell(PROMPT, 1)
        assert bench.engine.tokens_computed == len(PROMPT) + 2


async def test_every_layer_of_every_block_and_the_tail_is_stored():
    async with a_bench() as bench:
        await bench.prefill(a_prefill(PROMPT))
        assert len(bench.mover.runs) == 6 * LAYOUT.layers


async def test_the_mover_hears_how_much_of_the_last_block_is_filled():
    class Noting(MemoryMover):
        async def write(self, layer, grants, source, pages, priority, filled=None):  # type: ignore[no-untyped-def]
            heard.append((layer, len(grants), filled))
            await super().write(layer, grants, source, pages, priority, filled)

    heard: list[tuple[int, int, int | None]] = []
    async with a_bench(mover=Noting()) as bench:
        await bench.prefill(a_prefill(PROMPT))
    last = len(PROMPT) % LAYOUT.block_tokens
    chunks = [(2, LAYOUT.block_tokens), (2, LAYOUT.block_tokens), (2, last)]
    assert sorted(heard) == sorted((layer, *chunk) for layer in range(LAYOUT.layers) for chunk in chunks)
    assert 0 < last < LAYOUT.block_tokens


async def test_choices_share_one_computation():
    async with a_bench() as bench:
        assert await bench.prefill(a_prefill(PROMPT, choices=3)) == foretell(PROMPT, 1) * 3
        assert bench.engine.tokens_computed == len(PROMPT)


async def test_a_layer_waits_for_its_own_prefix_however_late_it_lands():
    class Slow(MemoryMover):
        async def read(self, layer, grants, out, pages, priority):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.05 if layer in (0, LAYOUT.layers - 1) else 0.0)
            return await super().read(layer, grants, out, pages, priority)

    async with a_bench(mover=Slow()) as bench:
        await bench.prefill(a_prefill(PROMPT))
        assert await bench.prefill(a_prefill(PROMPT, reuse=4)) == foretell(PROMPT, 1)


async def test_a_pass_is_timed_without_its_wait_for_the_prefix():
    class Slow(MemoryMover):
        async def read(self, layer, grants, out, pages, priority):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.2 if grants else 0.0)
            return await super().read(layer, grants, out, pages, priority)

    async with a_bench(mover=Slow()) as bench:
        await bench.prefill(a_prefill(PROMPT))
        cold = bench.service.load().timings
        assert [(timing.step, timing.tokens, timing.context) for timing in cold] == [(2, 8, 8), (3, 6, 16)]
        done = await bench.service.prefill(a_prefill(PROMPT, reuse=4), an_ask())
        (warm,) = bench.service.load().timings
        assert (warm.step, warm.tokens, warm.context) == (4, 6, 16)
        assert warm.seconds < done.load_s


HOME = SegmentId("home")
COPIES = [Copy(source, Grant(HOME, 9 - source, 1)) for source in (1, 2, 4)]
"""Of the second, third and fifth block of PROMPT."""


async def test_what_is_loaded_is_copied_and_committed_under_its_names():
    async with a_bench() as bench:
        await bench.prefill(a_prefill(PROMPT))
        names, bench.directory.slots = bench.directory.committed[:], []
        assert await bench.prefill(replace(a_prefill(PROMPT, reuse=5), copies=COPIES)) == foretell(PROMPT, 1)
        for copy in COPIES:
            for layer in range(LAYOUT.layers):
                original = bench.mover.runs[SEGMENT, copy.source, 1, layer]
                assert bench.mover.runs[HOME, copy.target.slot, 1, layer] == original
        assert bench.directory.slots == [1, 2, 3]  # after the one target, the tail
        assert bench.directory.committed[5:] == [names[copy.source] for copy in COPIES]


@pytest.mark.parametrize("error", [Stale("reused"), Corrupt("changed on its way"), PeerLost("gone")])
async def test_a_copy_that_cannot_be_written_is_not_committed_and_fails_nobody(error: Exception):
    async with a_bench() as bench:
        await bench.prefill(a_prefill(PROMPT))
        bench.mover.refused[HOME, 7] = error
        assert await bench.prefill(replace(a_prefill(PROMPT, reuse=5), copies=COPIES)) == foretell(PROMPT, 1)
        assert len(bench.directory.committed) == 5


async def test_a_copy_that_cannot_be_committed_fails_nobody():
    class Expired(NoDirectory):
        async def commit(self, lease: LeaseId, slots: list[int], blocks: list[BlockHash]) -> None:
            if len(slots) == len(COPIES):
                raise LeaseLost("the lease has ended")

    async with a_bench() as bench:
        await bench.prefill(a_prefill(PROMPT))
        bench.service._directory = FixedLink(Expired())
        assert await bench.prefill(replace(a_prefill(PROMPT, reuse=5), copies=COPIES)) == foretell(PROMPT, 1)


async def test_nothing_is_copied_of_a_layer_that_was_not_loaded_whole():
    async with a_bench() as bench:
        await bench.prefill(a_prefill(PROMPT))
        del bench.mover.runs[SEGMENT, 4, 1, 1]
        with pytest.raises(PrefixLost, match="block 4"):
            await bench.prefill(replace(a_prefill(PROMPT, reuse=5), copies=COPIES))
        assert {layer for segment, _, _, layer in bench.mover.runs if segment == HOME} <= {0}
        assert len(bench.directory.committed) == 5


async def test_computing_does_not_wait_for_copies():
    class SlowHome(MemoryMover):
        async def write(self, layer, grants, source, pages, priority, filled=None):  # type: ignore[no-untyped-def]
            if grants[0].segment == HOME:
                await computed.wait()
            await super().write(layer, grants, source, pages, priority, filled)

    class Telling(FakeEngine):
        def drawn(self, row):  # type: ignore[no-untyped-def]
            if self.passes > 3:
                computed.set()
            return super().drawn(row)

    computed = asyncio.Event()
    async with a_bench(Telling(), mover=SlowHome()) as bench:
        await bench.prefill(a_prefill(PROMPT))
        assert bench.engine.passes == 3
        assert await bench.prefill(replace(a_prefill(PROMPT, reuse=5), copies=COPIES)) == foretell(PROMPT, 1)
        assert len(bench.directory.committed) == 8


async def test_the_time_of_a_load_is_told_and_is_nothing_where_nothing_was_loaded():
    class Slow(MemoryMover):
        async def read(self, layer, grants, out, pages, priority):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.01)
            return await super().read(layer, grants, out, pages, priority)

    async with a_bench(mover=Slow()) as bench:
        assert (await bench.service.prefill(a_prefill(PROMPT), an_ask())).load_s == 0.0
        assert (await bench.service.prefill(a_prefill(PROMPT, reuse=5), an_ask())).load_s >= 0.01 * LAYOUT.layers


async def test_a_block_that_cannot_be_loaded_is_discarded_and_the_request_sent_back():
    async with a_bench() as bench:
        await bench.prefill(a_prefill(PROMPT))
        del bench.mover.runs[SEGMENT, 2, 1, 1]
        with pytest.raises(PrefixLost, match="block 2"):
            await bench.prefill(a_prefill(PROMPT, reuse=5))
        assert bench.directory.discarded == [Grant(SEGMENT, 2, 1)]
        assert await bench.prefill(a_prefill(PROMPT, reuse=2)) == foretell(PROMPT, 1)


@pytest.mark.parametrize("error", [Stale("reused"), Corrupt("changed"), NotFinite("NaN"), PeerLost("gone")])
async def test_a_store_that_is_refused_sends_the_request_back(error: Exception):
    async with a_bench() as bench:
        bench.mover.refused[SEGMENT, 3] = error
        with pytest.raises(StoreLost):
            await bench.prefill(a_prefill(PROMPT))


async def test_cancelling_stops_within_a_layer_and_frees_the_pages():
    async with a_bench(FakeEngine(layer_s=0.02)) as bench:
        task = asyncio.create_task(bench.prefill(a_prefill(PROMPT)))
        await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ran = bench.engine.layers_run
        await asyncio.sleep(0.06)
        assert bench.engine.layers_run <= ran + 1 < LAYOUT.layers * 3
        assert bench.service.load().blocks_free == bench.engine.pages


async def test_many_at_once_come_out_right_with_pages_for_two():
    async with a_bench(FakeEngine(pages=12), queue_max=32) as bench:
        prompts = [[n, *PROMPT[: n % 20]] for n in range(1, 21)]
        asks = (bench.prefill(a_prefill(p, name=str(n))) for n, p in enumerate(prompts))
        assert await asyncio.gather(*asks) == [foretell(p, 1) for p in prompts]


async def test_a_full_queue_refuses_at_once():
    async with a_bench(FakeEngine(layer_s=0.02), queue_max=1) as bench:
        first = asyncio.create_task(bench.prefill(a_prefill(PROMPT)))
        await asyncio.sleep(0)
        with pytest.raises(PrefillBusy):
            await bench.prefill(a_prefill(PROMPT, name="other"))
        assert await first == foretell(PROMPT, 1)


async def test_messages_that_do_not_fit_together_are_refused():
    good = a_prefill(PROMPT)
    bad = [
        replace(good, tokens=[], prompt_tokens=0),
        replace(good, targets=good.targets[1:]),
        replace(good, blocks=good.blocks[1:]),
        replace(good, prompt_tokens=len(PROMPT) + 1),
        a_prefill(PROMPT[:20], reuse=5),
        replace(a_prefill(PROMPT, reuse=4), copies=COPIES),
        replace(good, copies=[Copy(-1, Grant(HOME, 0, 1))]),
    ]
    async with a_bench() as bench:
        for message in bad:
            with pytest.raises(BadMessage):
                await bench.prefill(message)


async def test_a_pass_that_fails_ends_its_request_and_not_the_loop():
    class Broken(FakeEngine):
        def compute(self, layer: int, row: object) -> None:
            if 13 in row.tokens:  # type: ignore[attr-defined]
                raise RuntimeError("no such token")
            super().compute(layer, row)  # type: ignore[arg-type]

    async with a_bench(Broken()) as bench:
        with pytest.raises(RuntimeError):
            await bench.prefill(a_prefill([1, 13, 2]))
        assert await bench.prefill(a_prefill([1, 2, 3], name="next")) == foretell([1, 2, 3], 1)
