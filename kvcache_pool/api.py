"""What the KVCache pool promises. Read this first; nothing here does work.

Two services. The *directory* knows which block is where and who is using it. A *segment* is one
node's CPU memory, cut into slots of one block each.

The life of a block:

    Acquire ──> reserved ──Commit──> cached (named, found by Lookup) ──evicted──> free
                   │                    ^   while a lease names it, it is never evicted
                   └──Release/expiry──> free      (a reserved block that nobody committed)

A block is visible only once committed, so several writers may compute the same block at once: the
first commit gets the name, the others' copies stay private to their lease and go with it.
"""

import uuid
from collections.abc import Sequence
from dataclasses import field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from protocol.blocks import BlockLayout
from protocol.errors import PeerLost, RemoteError
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId
from protocol.message import Message
from protocol.rpc import Client
from protocol.transport import Transport

LEASE_S = 30.0
"""How long a lease lasts without renewal. Every transfer's deadline is shorter, so that a reader or
writer gives up before its blocks can go to somebody else."""

DIRECTORY_S = 5.0
"""The deadline of a call to the directory, which answers from memory in well under a millisecond."""

ANNOUNCE_EVERY_S = 0.5
"""How often a segment tells the directory that it is there."""

TRANSFER_S_MAX = 20.0
"""The deadline of one read or write of one layer, and of one write of whole blocks."""


class PoolFull(RemoteError):
    """No room, even after evicting all that no lease names."""

    kind = "pool_full"


class LeaseLost(RemoteError):
    """The lease ended (released, expired, or its owner was given up); its blocks may be somebody else's."""

    kind = "lease_lost"


class Stale(RemoteError):
    """A slot has another generation than the grant says: it was reused. Nothing was read or written."""

    kind = "stale"


class Corrupt(RemoteError):
    """A run's bytes do not have the checksum that was stored with them."""

    kind = "corrupt"


# -- the directory ----------------------------------------------------------------------------------


class Place(Message):
    """Where a segment is and how to reach its bytes."""

    segment: SegmentId
    incarnation: Incarnation
    address: str
    """Its service, for readers and writers on other hosts."""
    host: str
    shm: str
    """Path of its shared memory file, for those on the same host."""
    slots: int
    layout: BlockLayout


class Announce(Message):
    """A segment tells the directory that it is there, every ANNOUNCE_EVERY_S. Answered by Done."""

    place: Place
    generation: int = 0
    """The highest that any slot has seen: a directory that is new to this segment begins far above it."""


class Goodbye(Message):
    """A segment ends in good order: its blocks leave the index. Answered by Done."""

    segment: SegmentId
    incarnation: Incarnation


class Lookup(Message):
    """How much of this chain of blocks is cached, and where? Changes nothing. Answered by Found."""

    blocks: list[BlockHash]


class Found(Message):
    """The longest unbroken prefix, in blocks."""

    reach: int
    """Over all segments together: what the pool can serve."""
    held: dict[str, int]
    """Of each segment that has the first block: how far the chain goes in that segment alone."""


class Grant(NamedTuple):
    """A row. The right to read or write one slot, as long as the lease lasts."""

    segment: SegmentId
    slot: int
    generation: int


class Acquire(Message):
    """Lease the cached prefix of a prompt, and room for the rest. Answered by Lease; or PoolFull.

    All or nothing; a second ask under the name of a living lease is refused. `blocks` names the prompt's
    full blocks in order. At most the first `reuse` are taken from the cache (fewer if some went since the
    lookup); each of the others, and `unnamed` more (the tail), gets a free slot, in the segment `near` if
    that has room.
    """

    lease: LeaseId
    """Chosen by the asker, unlike any other (`new_lease`): so it can release what it never heard it got."""
    owner: str
    """The request, for the ledger."""
    blocks: list[BlockHash]
    reuse: int
    unnamed: int
    near: SegmentId | None
    lease_s: float = LEASE_S
    copies: int = 0
    """At most so many blocks of the cached prefix that `near` lacks get a slot there too, the first of them, as
    room and budget allow. The asker, who loads them anyway, writes them there: so a hot prefix spreads."""


def new_lease() -> LeaseId:
    """A name for a lease that nobody has used."""
    return LeaseId(uuid.uuid4().hex)


class Copy(Message):
    """Room in the segment `near` for one more copy of `sources[source]` of the lease."""

    source: int
    target: Grant


class Lease(Message):
    """`sources` hold KV (the cached prefix), `targets` wait for it, in the order of the prompt."""

    lease: LeaseId
    sources: list[Grant]
    targets: list[Grant]
    places: list[Place]
    """Of every segment that a grant names."""
    copies: list[Copy] = field(default_factory=list)
    """What was granted of the copies that were asked for, in the order of the prompt."""


class Commit(Message):
    """Targets are written: publish them under their names. Answered by Done; or LeaseLost.

    `slots[i]` gets `blocks[i]`: an index into `targets`, and then `copies`. Committing twice changes nothing.
    """

    lease: LeaseId
    slots: list[int]
    blocks: list[BlockHash]


class Renew(Message):
    """Extend a lease from now. Answered by Done; or LeaseLost."""

    lease: LeaseId
    lease_s: float = LEASE_S


class Release(Message):
    """End a lease: committed blocks stay cached, the others are freed. Answered by Done, also if it is gone."""

    lease: LeaseId
    prefix: list[BlockHash] = field(default_factory=list)
    """What comes before the lease's blocks, in order: it counts as used now too, and as used after them, so
    that the end of a chain is evicted before its beginning."""


class Discard(Message):
    """A reader found these blocks bad (checksum, or not readable): forget them. Answered by Done."""

    grants: list[Grant]


class Clear(Message):
    """Forget every block that no lease names. Answered by Cleared."""


class Cleared(Message):
    blocks: int


class GetStats(Message):
    """Answered by Stats."""


class Stats(Message):
    """Counts of blocks over all segments. free + cached + reserved == total."""

    total: int
    free: int
    cached: int
    reserved: int
    """Given to a lease and not committed."""
    leased: int
    """Cached and named by a lease."""
    leases: int
    evicted: int
    """Since the start."""
    copies: int
    """Cached or reserved in one segment as copies of what another has; in `cached` and `reserved` too."""


class Done(Message):
    """It is done."""


# -- a segment --------------------------------------------------------------------------------------


class ReadLayer(Message):
    """One layer of these slots. Answered by Runs, one buffer a slot."""

    layer: int
    slots: list[int]
    generations: list[int]


class Runs(Message):
    """The buffers beside this message hold one run each, in the order asked for."""

    valid: int
    """How many had the right generation before the first that had not; only these are sent."""
    checksums: list[int]
    """As they were stored: the reader verifies what arrived."""
    reason: str = ""
    """What was wrong with the first bad one."""


class WriteLayer(Message):
    """Write one layer of these slots from the buffers beside this message. Answered by Done; or Stale, Corrupt."""

    layer: int
    slots: list[int]
    generations: list[int]
    checksums: list[int]
    """By the writer: a page that was reused while its frame was under way is found out."""


class Priority(Enum):
    """Which transfer goes first when several wait: what a request waits for, before what only warms the cache."""

    LOAD = "load"
    STORE = "store"
    WRITE_BACK = "write_back"


class Mover(Protocol):
    """Moves runs between an engine's memory and segments, by whatever path reaches them. Handed to services.

    `out` and `source` are one layer of an engine's pages as bytes, shape [pages, run_bytes]; the run of
    `grants[i]` belongs to row `pages[i]`. At most one copy in and one copy out on one host.
    """

    def know(self, places: Sequence[Place]) -> None:
        """Learn where segments are. Must be told of every segment that a later grant names."""
        ...

    async def read(
        self,
        layer: int,
        grants: Sequence[Grant],
        out: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
    ) -> int:
        """Copy runs into pages. Returns how many leading runs are good: checksum and generation verified.

        Pages from that number on hold garbage. A segment that cannot be reached makes its runs bad; nothing is
        raised but cancellation.
        """
        ...

    async def write(
        self,
        layer: int,
        grants: Sequence[Grant],
        source: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
    ) -> None:
        """Copy runs out of pages, with their checksums. Raises Stale, Corrupt (changed on the way), PeerLost or
        DeadlineExceeded."""
        ...

    async def write_blocks(
        self, grants: Sequence[Grant], blocks: Sequence[npt.NDArray[np.uint8]], priority: Priority
    ) -> None:
        """As `write`, for blocks that are complete in all layers, each [layers, run_bytes]: one visit to a copying
        thread, where a write for each layer costs the event loop one each."""
        ...

    async def aclose(self) -> None:
        """Unmap memory and close connections."""
        ...


class Directory:
    """The client of the directory service: one method a message, each with its own deadline."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def lookup(self, blocks: list[BlockHash]) -> Found:
        """What of a chain is cached, and where. Changes nothing."""
        return await self._client.call(Lookup(blocks), Found, within_s=DIRECTORY_S)

    async def acquire(self, ask: Acquire) -> Lease:
        """Lease a prefix and room for the rest. Raises PoolFull."""
        return await self._client.call(ask, Lease, within_s=DIRECTORY_S)

    async def commit(self, lease: LeaseId, slots: list[int], blocks: list[BlockHash]) -> None:
        """Publish written targets. Raises LeaseLost."""
        await self._client.call(Commit(lease, slots, blocks), Done, within_s=DIRECTORY_S)

    async def renew(self, lease: LeaseId) -> None:
        """Extend a lease by LEASE_S from now. Raises LeaseLost."""
        await self._client.call(Renew(lease), Done, within_s=DIRECTORY_S)

    async def release(self, lease: LeaseId, prefix: Sequence[BlockHash] = ()) -> None:
        """End a lease; ending one that is gone is no error. `prefix` counts as used now."""
        await self._client.call(Release(lease, list(prefix)), Done, within_s=DIRECTORY_S)

    async def discard(self, grants: list[Grant]) -> None:
        """Forget blocks that could not be read as they were written."""
        await self._client.call(Discard(grants), Done, within_s=DIRECTORY_S)

    async def clear(self) -> int:
        """Forget every block that no lease names; returns how many."""
        return (await self._client.call(Clear(), Cleared, within_s=DIRECTORY_S)).blocks

    async def stats(self) -> Stats:
        """Counts of blocks."""
        return await self._client.call(GetStats(), Stats, within_s=DIRECTORY_S)


class DirectoryLink:
    """The directory, wherever it is at the moment. Its address is heard from the registry and may change."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._client: Client | None = None

    @property
    def address(self) -> str:
        """Of the current directory. Raises PeerLost while there is none."""
        if self._client is None:
            raise PeerLost("no directory is known")
        return self._client.address

    async def follow(self, address: str | None) -> None:
        """Connect to `address` if that is news. Others may call at the same time: the last address counts."""
        old = self._client
        if old is not None and old.address == address:
            return
        self._client = None if address is None else Client(self._transport, address).start()
        if old is not None:
            await old.aclose()

    def get(self) -> Directory:
        """The client of the current directory. Raises PeerLost while there is none."""
        if self._client is None:
            raise PeerLost("no directory is known")
        return Directory(self._client)

    async def aclose(self) -> None:
        """Disconnect; calls in flight fail with PeerLost."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()
