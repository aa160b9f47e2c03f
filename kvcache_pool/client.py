"""The KVCache pool for programs that are no part of Dango: put blocks of KV, find them by prefix, get them back.

    async with KVCachePool.connect("tcp://127.0.0.1:8002") as pool:
        await pool.put(tokens, blocks)
        found = await pool.lookup(tokens)
        blocks = await pool.get(tokens)

What is stored are blocks: the KV of `block_tokens` tokens over all layers, `[layers, 2, block_tokens, kv_heads,
head_dim]`. A block is named by its tokens and all before them, so most methods take either token ids (whose full
blocks are meant) or names of blocks. Bytes go between the caller's memory and the pool's without a copy between.

Errors, besides ValueError and TypeError for what no pool could do: PoolFull; LeaseLost; PeerLost and
DeadlineExceeded when a process is away, after which the next call looks where it is now.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from kvcache_pool.api import (
    LEASE_S,
    TRANSFER_S_MAX,
    Acquire,
    Blocks,
    Directory,
    Lease,
    Note,
    PinKind,
    PoolFull,
    Priority,
    SegmentStats,
    Stats,
    new_lease,
)
from kvcache_pool.buffers import Bytes, blocks_of
from kvcache_pool.guide import Guide
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.blocks import BlockLayout, HashRoot, block_hashes
from protocol.cluster import Mismatch
from protocol.errors import DangoError
from protocol.ids import BLOCK_HASH_BYTES, BlockHash, LeaseId, SegmentId, token_ids
from protocol.zmq_transport import ZmqTransport

CONDUCTOR = "tcp://127.0.0.1:8002"
"""Where `dango conductor` listens unless it is told otherwise."""

BATCH_BYTES = 64 << 20
"""Moved in one go. A transfer has TRANSFER_S_MAX, which a slow network must keep; between two of them the lease is
renewed."""

RENEW_AFTER_S = (LEASE_S - TRANSFER_S_MAX) / 2
"""A lease older than this is renewed before the next batch: it then outlasts the batch."""

ACQUIRE_TRIES = 3
"""Each needs blocks to be evicted between a lookup and the acquisition that follows at once."""

Chain = Iterable[int] | Iterable[bytes]
"""Token ids, of which the full blocks are meant, or the names of blocks, each 32 bytes."""


@dataclass(frozen=True)
class Cached:
    """How much of a chain of blocks the pool has."""

    tokens: int
    """From the first token on, unbroken."""
    blocks: int
    """The same in blocks."""
    segments: dict[str, int]
    """Of each segment that has the first block: how many blocks it has, unbroken, by itself."""


class KVCachePool:
    """A client of one pool. Made by `connect`; all methods may be called at once from several tasks."""

    def __init__(
        self, guide: Guide, mover: PoolMover, layout: BlockLayout, root: HashRoot | None, host: str
    ) -> None:
        self.layout = layout
        """The shape of a block."""
        self._guide = guide
        self._mover = mover
        self._root = root
        self._host = host
        self._near: SegmentId | None = None
        self._owner = f"client {host}"
        self._reached: set[SegmentId] = set()
        """Where something was read from, so that they can be reached."""
        self._returns: set[asyncio.Task[None]] = set()

    @staticmethod
    @asynccontextmanager
    async def connect(
        conductor: str | None = None,
        *,
        tenant: str = "",
        salt: str = "",
        directory: str | None = None,
        layout: BlockLayout | None = None,
        root: HashRoot | None = None,
        host: str = "",
        reach: str = "auto",
    ) -> AsyncIterator["KVCachePool"]:
        """Connect by the Conductor's control address, which is CONDUCTOR if none is given; or to a `directory`.

        The Conductor tells how blocks look and what their names start from; `tenant` and `salt` keep the blocks of
        some tokens apart from those of others. A directory tells neither: with it comes a `root` for the names of
        tokens' blocks, or a `layout` only, and then blocks go by names that the caller makes.

        `host` is this machine's name, if `dango kvcache --host` gave it another; `reach` is auto, shm or tcp.
        Raises PeerLost when nobody answers.
        """
        _require_one_way(conductor, directory, layout, root, tenant + salt)
        async with AsyncExitStack() as stack:
            transport = ZmqTransport()
            stack.callback(transport.close)
            asked = None if directory is not None else conductor or CONDUCTOR
            guide = Guide(transport, asked, directory)
            stack.push_async_callback(guide.aclose)
            if directory is None:
                root = (await guide.manifest()).root(tenant, salt)
            shape = root.layout if root is not None else layout
            assert shape is not None, "one of them was required"
            host = host or socket.gethostname()
            mover = PoolMover(transport, host, Reach(reach))
            stack.push_async_callback(mover.aclose)
            pool = KVCachePool(guide, mover, shape, root, host)
            stack.push_async_callback(pool._settle)
            await pool._find_home()
            yield pool

    # -- naming -------------------------------------------------------------------------------------

    def names(self, chain: Chain) -> list[BlockHash]:
        """The names of the full blocks of these tokens; or these names, checked. Raises ValueError, TypeError."""
        if isinstance(chain, (bytes, bytearray, str)):
            raise TypeError("a list of names or of tokens is wanted, not one name or text")
        items: list[int | bytes] = list(chain)
        names = [BlockHash(item) for item in items if isinstance(item, bytes)]
        tokens = [item for item in items if not isinstance(item, bytes)]
        if names and tokens:
            raise TypeError("either tokens or names of blocks, not both at once")
        if any(len(name) != BLOCK_HASH_BYTES for name in names):
            raise ValueError(f"the name of a block has {BLOCK_HASH_BYTES} bytes")
        return names or self._named(tokens)

    def _named(self, tokens: Sequence[int]) -> list[BlockHash]:
        if not tokens:
            return []
        if self._root is None:
            raise ValueError("blocks of tokens have names only with a Conductor or a root: give names of blocks")
        try:
            return block_hashes(self._root, token_ids(tokens))
        except OverflowError as error:
            raise ValueError(f"a token id has 32 bits, without a sign: {error}") from error

    # -- blocks in and out --------------------------------------------------------------------------

    async def put(self, chain: Chain, blocks: object) -> int:
        """Store blocks, one for each name. Returns how many were copied: those that are cached already are not.

        For `blocks` see `kvcache_pool/buffers.py`. All of them are found afterwards; or, after an error, none that
        was not found before. Their memory must not change until this returns. Raises PoolFull if they do not fit.
        """
        names = self.names(chain)
        rows = dict(zip(names, blocks_of(blocks, self.layout, len(names)), strict=True))
        if not names:
            return 0
        async with self._guide.directory() as directory:
            there = dict(zip(names, await directory.exists(names), strict=True))
            known = [name for name, cached in there.items() if cached]
            fresh = [name for name, cached in there.items() if not cached]
            return await self._store(directory, known, fresh, rows) if fresh else 0

    async def _store(
        self, directory: Directory, known: list[BlockHash], fresh: list[BlockHash], rows: dict[BlockHash, Bytes]
    ) -> int:
        """Under a lease that keeps the known ones too: room for the fresh ones is not made from them."""
        ask = Acquire(new_lease(), self._owner, known, len(known), len(fresh), self._near)
        async with self._leased(directory, ask) as lease:
            missing = [*known[len(lease.of.sources) :], *fresh]  # some may have gone since
            for batch in self._batches(len(missing)):
                await lease.last()
                blocks = [rows[name] for name in missing[batch]]
                await self._mover.write_blocks(lease.of.targets[batch], blocks, Priority.STORE)
            await directory.commit(ask.lease, list(range(len(missing))), missing)
        return len(missing)

    async def get(self, chain: Chain) -> Bytes:
        """The cached prefix in a new array, bytes [blocks, layers, run_bytes], verified by checksum; perhaps none.
        `typed` shows it in the pool's type and shape."""
        async with self._guide.directory() as directory, self._prefix(directory, self.names(chain)) as lease:
            count = len(lease.of.sources) if lease is not None else 0
            out = np.empty((count, self.layout.layers, self.layout.run_bytes), np.uint8)
            good = await self._load(directory, lease, out) if lease is not None else 0
        return out[:good]

    async def get_into(self, chain: Chain, out: object) -> int:
        """Read the cached prefix straight into the caller's memory, which has room for every block that is named.
        Returns how many leading blocks are good, verified by checksum; the memory after those is unspecified."""
        names = self.names(chain)
        rows = blocks_of(out, self.layout, len(names), writable=True)
        async with self._guide.directory() as directory, self._prefix(directory, names) as lease:
            return await self._load(directory, lease, rows) if lease is not None else 0

    async def _load(self, directory: Directory, lease: "Held", rows: Blocks) -> int:
        """Read all sources of a lease; returns how many leading ones are good.

        A bad block is made forgotten, so that it can be put again; but not in a segment of which nothing could be
        read before: it may only be out of our reach.
        """
        grants, done = lease.of.sources, 0
        for batch in self._batches(len(grants)):
            await lease.last()
            good = await self._mover.read_blocks(grants[batch], rows[batch], Priority.LOAD)
            self._reached.update(grant.segment for grant in grants[batch][:good])
            done += good
            if good < len(grants[batch]):
                if grants[done].segment in self._reached:
                    await directory.discard([grants[done]])
                break
        return done

    def _batches(self, count: int) -> list[slice]:
        step = max(1, BATCH_BYTES // self.layout.block_bytes)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def typed(self, blocks: Bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
        """Bytes [blocks, layers, run_bytes] as [blocks, layers, 2, block_tokens, kv_heads, head_dim], not copied.
        The elements of bfloat16 are uint16: numpy has no name for it."""
        layout = self.layout
        kind = "uint16" if layout.kv_type == "bfloat16" else layout.kv_type
        shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        return blocks.view(np.dtype(kind)).reshape(len(blocks), *shape)

    # -- asking -------------------------------------------------------------------------------------

    async def lookup(self, chain: Chain) -> Cached:
        """How much of this is cached from its beginning on, and where. Changes nothing."""
        async with self._guide.directory() as directory:
            found = await directory.lookup(self.names(chain))
        return Cached(found.reach * self.layout.block_tokens, found.reach, found.held)

    async def exists(self, chain: Chain) -> list[bool]:
        """Which of these blocks are cached, each for itself. Changes nothing."""
        async with self._guide.directory() as directory:
            return await directory.exists(self.names(chain))

    async def stats(self) -> Stats:
        """Counts of blocks over the whole pool."""
        async with self._guide.directory() as directory:
            return await directory.stats()

    async def segments(self) -> list[SegmentStats]:
        """Counts of blocks of each segment."""
        async with self._guide.directory() as directory:
            return await directory.segments()

    async def catalogue(self, segment: SegmentId) -> list[Note]:
        """What the directory believes that a segment holds: each block's slot, generation and name."""
        notes: list[Note] = []
        async with self._guide.directory() as directory:
            while part := (await directory.catalogue(segment, notes[-1].slot if notes else -1)).notes:
                notes += part
        return notes

    # -- keeping and forgetting ---------------------------------------------------------------------

    async def pin(self, chain: Chain, for_s: float, *, hard: bool = False) -> int:
        """Keep the cached prefix for so many seconds: a soft pin gives way when nothing else is left to evict, a
        hard one never. Returns how many blocks are pinned now."""
        kind = PinKind.HARD if hard else PinKind.SOFT
        async with self._guide.directory() as directory:
            return await directory.pin(self.names(chain), kind, for_s)

    async def unpin(self, chain: Chain) -> int:
        """These may be evicted again. Returns how many were pinned."""
        async with self._guide.directory() as directory:
            return await directory.unpin(self.names(chain))

    async def remove(self, chain: Chain) -> int:
        """Forget these blocks in all segments, pinned or not; but not those that somebody reads or writes now.
        Returns how many were forgotten."""
        async with self._guide.directory() as directory:
            return await directory.remove(self.names(chain))

    async def clear(self) -> int:
        """Forget every block of every client that nobody reads or writes now. Returns how many."""
        async with self._guide.directory() as directory:
            return await directory.clear()

    # -- leases -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _prefix(self, directory: Directory, names: list[BlockHash]) -> AsyncIterator["Held | None"]:
        """Lease what is cached of a chain; None if that is nothing."""
        async with AsyncExitStack() as stack:
            for attempt in range(ACQUIRE_TRIES):
                reach = (await directory.lookup(names)).reach if names else 0
                if reach == 0:
                    yield None
                    return
                ask = Acquire(new_lease(), self._owner, names[:reach], reach, 0, self._near)
                try:
                    held = await stack.enter_async_context(self._leased(directory, ask))
                    break
                except PoolFull:  # some went meanwhile, and there is no room for them
                    if attempt == ACQUIRE_TRIES - 1:
                        raise
            yield held

    @asynccontextmanager
    async def _leased(self, directory: Directory, ask: Acquire) -> AsyncIterator["Held"]:
        """Hold a lease, and give it back in any case: also if its answer was never heard."""
        try:
            lease = await directory.acquire(ask)
            self._know(lease)
            yield Held(directory, lease)
        finally:
            returning = asyncio.create_task(self._release(directory, ask.lease))
            self._returns.add(returning)
            returning.add_done_callback(self._returns.discard)
            await asyncio.shield(returning)

    async def _release(self, directory: Directory, lease: LeaseId) -> None:
        with contextlib.suppress(DangoError):  # it then ends by itself
            await directory.release(lease)

    def _know(self, lease: Lease) -> None:
        """Where its segments are. Raises Mismatch if their blocks are not like ours."""
        for place in lease.places:
            if place.layout != self.layout:
                raise Mismatch(
                    f"segment {place.segment} has blocks of {place.layout}, and this client {self.layout}"
                )
        self._mover.know(lease.places)

    async def _find_home(self) -> None:
        """Prefer the memory of this machine for what is put."""
        async with self._guide.directory() as directory:
            memories = [one for one in await directory.segments() if not one.on_disk]
        local = [one.segment for one in memories if one.host == self._host]
        self._near = local[0] if local else None

    async def _settle(self) -> None:
        """Wait for leases that are being given back; each has its deadline."""
        await asyncio.gather(*self._returns)


class Held:
    """A lease that is ours now."""

    def __init__(self, directory: Directory, lease: Lease) -> None:
        self.of = lease
        self._directory = directory
        self._since = asyncio.get_running_loop().time()

    async def last(self) -> None:
        """See to it that it outlasts one more transfer. Raises LeaseLost."""
        now = asyncio.get_running_loop().time()
        if now - self._since > RENEW_AFTER_S:
            await self._directory.renew(self.of.lease)
            self._since = now


def _require_one_way(
    conductor: str | None, directory: str | None, layout: BlockLayout | None, root: HashRoot | None, apart: str
) -> None:
    """Raises ValueError unless just one of them says what a block is."""
    if directory is None:
        if layout is not None or root is not None:
            raise ValueError("the Conductor tells what a block is: a layout or a root is for a directory alone")
    elif conductor is not None:
        raise ValueError("either the Conductor's address or the directory's, not both")
    elif (layout is None) == (root is None):
        raise ValueError("a directory does not tell what a block is: give a layout, or a root that has one")
    elif apart:
        raise ValueError("tenant and salt are part of a root: put them there")
