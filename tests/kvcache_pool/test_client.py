"""The client that others use, against real services and sockets; and what its document shows."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcache_pool.api import PoolFull
from kvcache_pool.client import Cached, KVCachePool
from kvcache_pool.leasing import RENEW_AFTER_S
from kvcache_pool.segment import Bytes
from protocol.blocks import BlockLayout, block_hashes
from protocol.cluster import Manifest, Mismatch
from protocol.errors import PeerLost, RemoteError
from protocol.registry import DirectoryAt, GetDirectory, GetManifest
from protocol.rpc import Server, at_once
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_pool, an_ask, names, random_runs

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = Manifest("tiny", "m", "t", 256, LAYOUT)
TOKENS = list(range(100, 175))
"""Four full blocks and a tail."""


class Conductor:
    """As much of one as a client asks."""

    def __init__(self, transport: ZmqTransport, directory: str | None, manifest: Manifest = MANIFEST) -> None:
        self.directory = directory
        rows = [
            at_once(GetManifest, lambda _: manifest),
            at_once(GetDirectory, lambda _: DirectoryAt(self.directory)),
        ]
        self._server = Server(transport.bind("tcp://127.0.0.1:0"), dict(rows))
        self.address = self._server.address

    async def __aenter__(self) -> "Conductor":
        self._task = asyncio.create_task(self._server.serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 8) as pool:
        yield pool
        await at_rest(pool)


@asynccontextmanager
async def a_client(pool: Pool, **how: Any) -> AsyncIterator[KVCachePool]:
    async with KVCachePool.connect(**{"directory": pool.address, "layout": LAYOUT, "host": HOST, **how}) as client:
        yield client


def some(count: int, seed: int = 0, layout: BlockLayout = LAYOUT) -> Bytes:
    """[count, layers, run_bytes]"""
    return random_runs(count * layout.layers, seed, layout).reshape(count, layout.layers, -1)


async def at_rest(pool: Pool) -> None:
    """Every lease is given back."""
    async with asyncio.timeout(5.0):
        while pool.index.stats().leases:  # noqa: ASYNC110 - only the service can tell
            await asyncio.sleep(0.001)
    assert pool.index.stats().reserved == 0


@pytest.mark.parametrize("reach", ["shm", "tcp", "auto"])
async def test_what_was_put_is_found_and_comes_back(pool: Pool, reach: str) -> None:
    blocks = some(4)
    async with a_client(pool, reach=reach) as client:
        assert await client.put(names(1, 2, 3, 4), blocks) == 4
        assert await client.lookup(names(1, 2, 7, 4)) == Cached(32, 2, {"kv-0": 2})
        assert await client.exists(names(7, 2, 8, 4)) == [False, True, False, True]
        assert np.array_equal(await client.get(names(1, 2, 3, 4, 5)), blocks)
        assert (await client.get(names(5, 1))).shape == (0, LAYOUT.layers, LAYOUT.run_bytes)
        out = np.zeros_like(some(4))
        assert await client.get_into(names(1, 2, 9, 4), out) == 2
        assert np.array_equal(out[:2], blocks[:2])
        assert (await client.stats()).cached == 4
        assert await client.clear() == 4
        assert await client.get_into(names(1), [out[0]]) == 0
        assert await client.put([], []) == 0
        assert await client.lookup([]) == Cached(0, 0, {})


async def test_tokens_are_named_as_the_cluster_names_them(pool: Pool) -> None:
    async with Conductor(pool.transport, pool.address) as conductor:
        async with KVCachePool.connect(conductor.address, host=HOST) as client:
            assert client.names(TOKENS) == block_hashes(MANIFEST.root(), TOKENS)
            assert client.names(np.array(TOKENS)) == client.names(torch.tensor(TOKENS)) == client.names(TOKENS)
            assert await client.put(TOKENS, some(4)) == 4
            assert await client.lookup(TOKENS[:40]) == Cached(32, 2, {"kv-0": 2})
            assert np.array_equal(await client.get([*TOKENS[:20], *range(20)]), some(4)[:1])
        async with KVCachePool.connect(conductor.address, salt="apart") as client:
            assert (await client.lookup(TOKENS)).tokens == 0
        root = MANIFEST.root(tenant="other")
        async with KVCachePool.connect(directory=pool.address, root=root) as client:
            assert client.names(TOKENS) == block_hashes(root, TOKENS)


async def test_what_is_cached_already_is_not_copied_again(pool: Pool) -> None:
    async with a_client(pool) as client:
        assert await client.put(names(1, 2), some(2)) == 2
        before = pool.index.stats()
        assert await client.put(names(1, 2), some(2, seed=9)) == 0
        assert pool.index.stats() == before
        assert await client.put(names(1, 2, 3, 4), some(4, seed=1)) == 2
        assert np.array_equal(await client.get(names(1, 2, 3, 4)), [*some(2), *some(4, seed=1)[2:]])
        assert await client.put(names(5, 3, 6), some(3, seed=2)) == 2
        assert pool.index.stats().cached == 6


async def test_room_for_the_rest_of_a_prompt_is_not_made_from_its_beginning(tmp_path: Path) -> None:
    async with a_pool(tmp_path, 4) as pool, a_client(pool) as client:
        await client.put(names(1, 2, 3), some(3))
        await client.put(names(9), some(1))
        assert await client.put(names(1, 2, 3, 4), some(4)) == 1
        assert await client.exists(names(1, 2, 3, 4, 9)) == [True, True, True, True, False]
        before = pool.index.stats()
        with pytest.raises(PoolFull):
            await client.put(names(1, 2, 3, 4, 5), some(5))
        assert (pool.index.stats().cached, pool.index.stats().evicted) == (before.cached, before.evicted)
        assert pool.index.stats().leases == 0


@pytest.mark.parametrize("reach", ["shm", "tcp"])
async def test_a_get_answers_exactly_the_valid_prefix_and_what_is_bad_can_be_put_again(
    pool: Pool, reach: str
) -> None:
    blocks = some(4)
    async with a_client(pool, reach=reach) as client:
        await client.put(names(1, 2, 3, 4), blocks)
        slot = next(grant.slot for name, _, grant in pool.index.named() if name == names(3)[0])
        pool.segments[0].memory.runs[slot, LAYOUT.layers - 1, -1] ^= 1
        assert np.array_equal(await client.get(names(1, 2, 3, 4)), blocks[:2])
        assert (await client.lookup(names(1, 2, 3, 4))).blocks == 2
        assert await client.put(names(1, 2, 3, 4), blocks) == 1
        assert np.array_equal(await client.get(names(1, 2, 3, 4)), blocks)


async def test_a_segment_that_this_client_cannot_reach_keeps_its_blocks(pool: Pool, tmp_path: Path) -> None:
    async with a_client(pool) as client:
        await client.put(names(1, 2), some(2))
    pool.segments[0].path.rename(tmp_path / "away")
    async with a_client(pool, reach="shm") as client:
        assert len(await client.get(names(1, 2))) == 0
    (tmp_path / "away").rename(pool.segments[0].path)
    async with a_client(pool, reach="shm") as client:
        assert np.array_equal(await client.get(names(1, 2)), some(2))


async def test_torchs_memory_is_read_from_and_written_to_where_it_lies(pool: Pool) -> None:
    shape = (3, LAYOUT.layers, 2, LAYOUT.block_tokens, LAYOUT.kv_heads, LAYOUT.head_dim)
    kv, out = torch.randn(shape).to(torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    async with a_client(pool) as client:
        assert await client.put(names(1, 2, 3), kv) == 3
        assert await client.get_into(names(1, 2, 3), out) == 3
        assert torch.equal(kv, out)
        pages = torch.zeros((LAYOUT.layers, 5, *shape[2:]), dtype=torch.bfloat16)
        assert await client.get_into(names(1, 2), [pages[:, 4], pages[:, 0]]) == 2
        assert torch.equal(pages[:, 4], kv[0])
        assert torch.equal(pages[:, 0], kv[1])
        typed = client.typed(await client.get(names(1, 2, 3)))
        assert typed.shape == shape
        assert np.array_equal(typed, kv.view(torch.uint16).numpy())


@pytest.mark.parametrize("reach", ["shm", "tcp"])
async def test_a_put_that_is_interrupted_leaves_nothing_wherever_it_was(pool: Pool, reach: str) -> None:
    async with a_client(pool, reach=reach) as client:
        interrupted = 0
        for turns in range(120):
            task = asyncio.create_task(client.put(names(1, 2, 3), some(3)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await at_rest(pool)
            assert pool.index.stats().cached in ((0,) if turns == 0 else (0, 3))
            interrupted += task.cancelled()
            await client.clear()
        assert interrupted > 10
        assert await client.put(names(1, 2, 3), some(3)) == 3


async def test_who_is_cancelled_twice_still_gives_its_lease_back(pool: Pool) -> None:
    async with a_client(pool) as client:
        task = asyncio.create_task(client.put(names(1, 2, 3), some(3)))
        while not pool.index.stats().leases:  # noqa: ASYNC110 - only the service can tell
            await asyncio.sleep(0)
        for _ in range(200):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
    assert pool.index.stats().leases == 0


async def test_many_tasks_put_and_get_the_same_blocks_at_once(tmp_path: Path) -> None:
    blocks = some(6)
    chain = names(1, 2, 3, 4, 5, 6)
    async with a_pool(tmp_path, 128) as pool, a_client(pool) as one, a_client(pool, reach="tcp") as two:

        async def turn(client: KVCachePool, count: int) -> None:
            await client.put(chain[:count], blocks[:count])
            assert np.array_equal(await client.get(chain[:count]), blocks[:count])

        await asyncio.gather(*(turn(client, count) for client in (one, two) for count in (1, 3, 6, 2) * 4))
        await at_rest(pool)
        assert pool.index.stats().cached == 6


async def test_a_lease_that_grows_old_is_renewed_before_the_next_transfer(pool: Pool) -> None:
    async with a_client(pool) as client:
        await client.put(names(1), some(1))
        loop = asyncio.get_running_loop()
        ask = an_ask(names(1))
        async with client._guide.directory() as directory, client._leasing.leased(directory, ask) as held:
            claim = pool.index._leases.find(held.of.lease)
            assert claim is not None
            first = claim.end
            await held.last()
            assert claim.end == first
            held._since = loop.time() - RENEW_AFTER_S - 0.1
            await asyncio.sleep(0.01)
            await held.last()
            assert claim.end > first


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda c: c.put(names(1, 2), some(3)),
            ValueError,
            "2 blocks of 6144 bytes are named, and the memory has",
        ),
        (lambda c: c.put(names(1), [some(2)]), ValueError, "a block has 6144 bytes, not 12288"),
        (
            lambda c: c.put(names(1), some(1).astype(np.float64)),
            TypeError,
            "KV is bfloat16: its elements cannot be",
        ),
        (lambda c: c.put(names(1)[0], some(1)), TypeError, "not one name"),
        (lambda c: c.put([b"short"], some(1)), ValueError, "the name of a block has 32 bytes"),
        (lambda c: c.put([*names(1), 7], some(1)), TypeError, "not both at once"),
        (lambda c: c.put(TOKENS, some(4)), ValueError, "only with a Conductor or a root"),
        (lambda c: c.get_into(names(1), bytes(LAYOUT.block_bytes)), ValueError, "read-only"),
        (lambda c: c.get_into(names(1, 2), some(1)), ValueError, "2 blocks of 6144 bytes"),
        (lambda c: c.get("text"), TypeError, "not one name or text"),
    ],
)
async def test_what_no_pool_could_do_is_refused_in_words_and_changes_nothing(
    pool: Pool, call: Callable[[KVCachePool], Any], error: type[Exception], sentence: str
) -> None:
    async with a_client(pool) as client:
        before = pool.index.stats()
        with pytest.raises(error, match=sentence):
            await call(client)
        assert pool.index.stats() == before


@pytest.mark.parametrize(
    ("tokens", "error"), [([-1] * 16, ValueError), ([1 << 32] * 16, ValueError), ([0.5], TypeError)]
)
async def test_what_is_no_token_is_refused(pool: Pool, tokens: list[int], error: type[Exception]) -> None:
    async with KVCachePool.connect(directory=pool.address, root=MANIFEST.root()) as client:
        with pytest.raises(error):
            client.names(tokens)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"directory": "tcp://127.0.0.1:1"}, "give a layout, or a root"),
        (
            {"directory": "tcp://127.0.0.1:1", "layout": LAYOUT, "root": MANIFEST.root()},
            "give a layout, or a root",
        ),
        ({"directory": "tcp://127.0.0.1:1", "conductor": "tcp://127.0.0.1:2"}, "not both"),
        ({"directory": "tcp://127.0.0.1:1", "layout": LAYOUT, "salt": "s"}, "part of a root"),
        ({"layout": LAYOUT}, "for a directory alone"),
    ],
)
async def test_one_way_to_the_pool_is_enough(how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        async with KVCachePool.connect(**how):
            raise AssertionError("it connected")


async def test_where_nobody_answers_is_told_within_seconds() -> None:
    transport = ZmqTransport()
    try:
        async with asyncio.timeout(10.0), Conductor(transport, None) as conductor:
            with pytest.raises(PeerLost, match="knows of no directory"):
                async with KVCachePool.connect(conductor.address):
                    raise AssertionError("it connected")
            with pytest.raises(PeerLost, match="nobody listens at"):
                async with KVCachePool.connect("tcp://127.0.0.1:1"):
                    raise AssertionError("it connected")
    finally:
        transport.close()


async def test_blocks_of_another_layout_are_refused(pool: Pool) -> None:
    other = BlockLayout(layers=3, kv_heads=2, head_dim=16, block_tokens=16, kv_type="float16")
    async with a_client(pool, layout=other) as client:
        with pytest.raises(Mismatch, match="segment kv-0 has blocks of BlockLayout"):
            await client.put(names(1), some(1))


async def test_a_directory_that_comes_back_elsewhere_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    async with a_pool(tmp_path / "two", 8) as two, Conductor(two.transport, None) as conductor:
        async with a_pool(tmp_path, 8) as one:
            conductor.directory = one.address
            client_of = KVCachePool.connect(conductor.address, host=HOST)
            client = await client_of.__aenter__()
            await client.put(TOKENS, some(4))
        try:
            conductor.directory = two.address
            with pytest.raises(PeerLost):
                await client.lookup(TOKENS)
            assert (await client.lookup(TOKENS)).tokens == 0
            assert await client.put(TOKENS, some(4)) == 4
            assert np.array_equal(await client.get(TOKENS), some(4))
        finally:
            await client_of.__aexit__(None, None, None)


async def test_while_one_conductor_is_away_another_tells_where_the_directory_is(pool: Pool) -> None:
    async with Conductor(pool.transport, pool.address) as last:
        async with Conductor(pool.transport, pool.address) as first:
            client_of = KVCachePool.connect(f"{first.address},{last.address}", host=HOST)
            client = await client_of.__aenter__()
        try:
            client._guide._known = False
            assert await client.put(TOKENS, some(4)) == 4
            assert client._guide._conductors[0].address == last.address
        finally:
            await client_of.__aexit__(None, None, None)


async def test_pins_hold_what_is_cached_and_removal_takes_single_blocks(tmp_path: Path) -> None:
    async with a_pool(tmp_path, 4) as pool, a_client(pool) as client:
        await client.put(names(1, 2), some(2))
        assert await client.pin(names(1, 2, 3), 60.0, hard=True) == 2
        assert [one.pinned for one in await client.segments()] == [2]
        await client.put(names(4, 5), some(2))
        await client.put(names(6, 7), some(2))
        assert await client.exists(names(1, 2, 4, 5)) == [True, True, False, False]
        assert await client.unpin(names(1, 2)) == 2
        assert await client.remove(names(2, 3)) == 1
        assert await client.exists(names(1, 2)) == [True, False]
        with pytest.raises(RemoteError):
            await client.pin(names(1), -1.0)


def test_it_is_imported_without_torch() -> None:
    code = "import sys, kvcache_pool.client, kvcache_pool.operate\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def programs() -> list[tuple[str, str]]:
    """The programs of the document, each with what it prints."""
    text = (ROOT / "docs/pool.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("program", "prints"), programs(), ids=range(len(programs())))
async def test_the_programs_of_the_document_run_and_print_what_it_says(
    pool: Pool, program: str, prints: str
) -> None:
    async with Conductor(pool.transport, pool.address) as conductor:
        assert "tcp://127.0.0.1:8002" in program
        code = program.replace("tcp://127.0.0.1:8002", conductor.address)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), 60.0)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert (process.returncode, out.decode(), err.decode()) == (0, prints, "")


def test_the_document_has_no_program_that_is_not_run() -> None:
    text = (ROOT / "docs/pool.md").read_text(encoding="utf-8")
    assert len(programs()) == text.count("```python") >= 3
