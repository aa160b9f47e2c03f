"""The KVCache pool for programs that are no part of Dango: put blocks of KV, find them by prefix, get them back.

    async with KVCachePool.connect("tcp://127.0.0.1:8002") as pool:
        await pool.put(tokens, blocks)
        found = await pool.lookup(tokens)
        blocks = await pool.get(tokens)

What is stored are blocks: the KV of `block_tokens` tokens over all layers, `[layers, 2, block_tokens, kv_heads,
head_dim]`. A block is named by its tokens and all before them, so most methods take either token ids (whose full
blocks are meant) or names of blocks. Bytes go between the caller's memory and the pool's without a copy between.

Errors, besides ValueError and TypeError for what no pool could do: PoolFull, and of that QuotaExceeded; LeaseLost;
WrongTenant; PeerLost and DeadlineExceeded when a process is away, after which the next call looks where it is now.
"""

import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvcache_pool.aligned import aligned
from kvcache_pool.api import Blocks, Note, PinKind, Priority, SegmentStats, Stats, TenantStats
from kvcache_pool.buffers import Bytes, blocks_of
from kvcache_pool.guide import Guide
from kvcache_pool.leasing import Leasing
from kvcache_pool.loading import Load
from kvcache_pool.moving import Moving
from kvcache_pool.storing import store
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from kvcache_pool.transfer.mover import BlockMover, Reach
from kvcache_pool.transfer.packed import mover_to
from kvcache_pool.transfers import Progress, Transfer, Transfers
from protocol.blocks import BlockLayout, HashRoot, block_hashes
from protocol.ids import BLOCK_HASH_BYTES, BlockHash, SegmentId, tenant_id, token_ids
from protocol.zmq_transport import ZmqTransport

CONDUCTOR = "tcp://127.0.0.1:8002"
"""Where `dango conductor` listens unless it is told otherwise."""

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
        self, guide: Guide, mover: BlockMover, layout: BlockLayout, root: HashRoot | None, host: str, tenant: str
    ) -> None:
        self.layout = layout.plain
        """The shape of a block as it is put and got: never compressed."""
        self.stored = layout
        """The same as the pool holds it."""
        self._guide = guide
        self._root = root
        self._host = host
        self._tenant = tenant_id(tenant)
        self._leasing = Leasing(mover, layout, f"client {host}", self._tenant)
        self._transfers = Transfers()
        self._moving = Moving(mover, self._leasing, layout.plain)

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
        mooncake: MooncakeSettings = MooncakeSettings(),  # noqa: B008  it is frozen
    ) -> AsyncIterator["KVCachePool"]:
        """Connect by the Conductor's control address, which is CONDUCTOR if none is given, or by those of several
        with commas between, which are asked in turn; or to a `directory`.

        The Conductor tells how blocks look and what their names start from; `tenant` and `salt` keep the blocks of
        some tokens apart from those of others. A directory tells neither: with it comes a `root` for the names of
        tokens' blocks, or a `layout` only, and then blocks go by names that the caller makes. All blocks are the
        tenant's (with a `root`, that of the root): no other's are read, and its quota counts.

        `host` is this machine's name, if `dango kvcache --host` gave it another; `reach` is auto, shm, tcp or
        mooncake, whose engine `mooncake` tells how to be used.
        Leaving the `async with` waits for transfers that are open; when an error leaves it, they are cancelled.
        Raises PeerLost when nobody answers.
        """
        _require_one_way(conductor, directory, layout, root, salt or (tenant if layout is None else ""))
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
            mover = mover_to(transport, host, Reach(reach), shape, mooncake)
            stack.push_async_callback(mover.aclose)
            pool = KVCachePool(guide, mover, shape, root, host, tenant if root is None else root.tenant)
            stack.push_async_callback(pool._leasing.settle)
            await stack.enter_async_context(pool._transfers)
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
        names, rows = self._to_store(chain, blocks)
        return await self._put(names, rows, Priority.STORE, Progress(len(names)))

    async def get(self, chain: Chain) -> Bytes:
        """The cached prefix in a new array, bytes [blocks, layers, run_bytes], verified by checksum; perhaps none.
        `typed` shows it in the pool's type and shape."""
        names = self.names(chain)
        async with self._guide.directory() as directory:
            found = await directory.lookup(names)
            out = aligned(found.reach, self.layout.layers, self.layout.run_bytes)
            load = Load(self._leasing, directory, names[: found.reach], out, Progress(found.reach), Priority.LOAD)
            return out[: await load.run(found)]

    async def get_into(self, chain: Chain, out: object) -> int:
        """Read the cached prefix straight into the caller's memory, which has room for every block that is named.
        Returns how many leading blocks are good, verified by checksum; the memory after those is unspecified."""
        names = self.names(chain)
        rows = blocks_of(out, self.layout, len(names), writable=True)
        return await self._get_into(names, rows, Priority.LOAD, Progress(len(names)))

    def start_put(
        self, chain: Chain, blocks: object, *, priority: Priority = Priority.STORE, within_s: float | None = None
    ) -> Transfer:
        """Begin a `put` and return at once: awaiting what is returned gives what `put` would.

        Their memory must not change until it has ended. Of several that move at once the one of the most urgent
        `priority` goes first: LOAD, STORE, WRITE_BACK. After `within_s` seconds it ends with DeadlineExceeded.
        Raises ValueError and TypeError as `put` does, and asyncio.QueueFull when 4,096 transfers are open.
        """
        names, rows = self._to_store(chain, blocks)
        move = partial(self._put, names, rows, priority)
        return self._transfers.start(move, len(names), priority, within_s)

    def start_get_into(
        self, chain: Chain, out: object, *, priority: Priority = Priority.LOAD, within_s: float | None = None
    ) -> Transfer:
        """Begin a `get_into` and return at once, as `start_put` does. The memory is the transfer's until it has
        ended, and is not touched after that."""
        names = self.names(chain)
        rows = blocks_of(out, self.layout, len(names), writable=True)
        move = partial(self._get_into, names, rows, priority)
        return self._transfers.start(move, len(names), priority, within_s)

    def _to_store(self, chain: Chain, blocks: object) -> tuple[list[BlockHash], dict[BlockHash, Bytes]]:
        names = self.names(chain)
        return names, dict(zip(names, blocks_of(blocks, self.layout, len(names)), strict=True))

    async def _put(
        self, names: list[BlockHash], rows: dict[BlockHash, Bytes], priority: Priority, progress: Progress
    ) -> int:
        if not names:
            return 0
        async with self._guide.directory() as directory:
            there = dict(zip(names, await directory.exists(names), strict=True))
            known = [name for name, cached in there.items() if cached]
            fresh = [name for name, cached in there.items() if not cached]
            progress.done = len(known)
            if not fresh:
                return 0
            return await store(self._leasing, directory, known, fresh, rows, progress, priority)

    async def _get_into(self, names: list[BlockHash], rows: Blocks, priority: Priority, progress: Progress) -> int:
        async with self._guide.directory() as directory:
            return await Load(self._leasing, directory, names, rows, progress, priority).run()

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

    async def tenant(self) -> TenantStats:
        """How much of the pool's memory this client's tenant has, and may have."""
        async with self._guide.directory() as directory:
            return await directory.tenant(self._tenant)

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
            return await directory.pin(self.names(chain), kind, for_s, self._tenant)

    async def unpin(self, chain: Chain) -> int:
        """These may be evicted again. Returns how many were pinned."""
        async with self._guide.directory() as directory:
            return await directory.unpin(self.names(chain), self._tenant)

    async def remove(self, chain: Chain) -> int:
        """Forget these blocks in all segments, pinned or not; but not those that somebody reads or writes now.
        Returns how many were forgotten. Raises Unconfirmed, as `clear` does."""
        async with self._guide.directory() as directory:
            return await directory.remove(self.names(chain), self._tenant)

    async def clear(self) -> int:
        """Forget every block of every client that nobody reads or writes now. Returns how many. Raises Unconfirmed
        if they are forgotten, and a segment that dies now may yet bring them back."""
        async with self._guide.directory() as directory:
            return await directory.clear()

    # -- where blocks are ---------------------------------------------------------------------------

    async def copy(self, chain: Chain, segment: str) -> int:
        """Copy the cached prefix to a segment, as far as room and the budget of copies go; not what only a disk
        has. Returns how many of its blocks are there now. Raises ValueError for a segment that takes nothing."""
        async with self._guide.directory() as directory:
            return await self._moving.to(directory, self.names(chain), SegmentId(segment), moves=False)

    async def move(self, chain: Chain, segment: str) -> int:
        """As `copy`, with their pins, against no budget, and from disks too. What was elsewhere is forgotten there
        within about a second, or when nobody reads it any more."""
        async with self._guide.directory() as directory:
            return await self._moving.to(directory, self.names(chain), SegmentId(segment), moves=True)

    async def drain(self, segment: str, *, undo: bool = False) -> int:
        """Have a segment emptied: it gets no blocks any more, and its owner carries those that it has to others,
        as far as there is room for them. Or end that. Returns how many blocks it holds; `segments` tells how it
        goes on. Raises CannotDrain for a segment that is not there, or the only memory."""
        async with self._guide.directory() as directory:
            return await directory.drain(SegmentId(segment), undo=undo)

    async def _find_home(self) -> None:
        """Prefer the memory of this machine for what is put."""
        async with self._guide.directory() as directory:
            memories = [one for one in await directory.segments() if not one.on_disk and not one.draining]
        local = [one.segment for one in memories if one.host == self._host]
        self._leasing.near = local[0] if local else None


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
        raise ValueError("tenant and salt are part of a root: put them there; names of your own have no salt")
