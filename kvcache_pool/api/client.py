"""The directory as others call it."""

from collections.abc import Sequence

from kvcache_pool.api.deadlines import DIRECTORY_S, NOTED_S
from kvcache_pool.api.directory import (
    Acquire,
    Carried,
    Carry,
    Catalogue,
    Clear,
    Cleared,
    Commit,
    Counted,
    Discard,
    Done,
    Drain,
    Due,
    Existing,
    Exists,
    Found,
    GetCatalogue,
    GetDue,
    GetSegments,
    GetStats,
    Grant,
    Lease,
    Lookup,
    Pin,
    PinKind,
    Release,
    Remove,
    Renew,
    Segments,
    SegmentStats,
    Stats,
    Unpin,
)
from kvcache_pool.api.tenants import GetTenant, TenantStats
from protocol.errors import BadMessage, PeerLost
from protocol.ids import BlockHash, Ids, LeaseId, SegmentId, TenantId, token_ids
from protocol.rpc import Client
from protocol.transport import Transport


class Directory:
    """The client of the directory service: one method a message, each with its own deadline."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def lookup(self, blocks: list[BlockHash]) -> Found:
        """What of a chain is cached, and where. Changes nothing."""
        return await self._client.call(Lookup(blocks), Found, within_s=DIRECTORY_S)

    async def exists(self, blocks: list[BlockHash]) -> list[bool]:
        """Which of these are cached, each for itself. Changes nothing."""
        cached = (await self._client.call(Exists(blocks), Existing, within_s=DIRECTORY_S)).cached
        if len(cached) != len(blocks):
            raise BadMessage(
                f"{self._client.address} tells of {len(cached)} blocks, and was asked of {len(blocks)}"
            )
        return cached

    async def acquire(self, ask: Acquire) -> Lease:
        """Lease a prefix and room for the rest. Raises PoolFull, or of that QuotaExceeded; and WrongTenant."""
        return await self._client.call(ask, Lease, within_s=DIRECTORY_S)

    async def commit(
        self,
        lease: LeaseId,
        slots: list[int],
        blocks: list[BlockHash],
        tokens: Ids | None = None,
        parent: BlockHash | None = None,
    ) -> None:
        """Publish written targets, and tell their tokens if they are wanted. Raises LeaseLost, WrongTenant."""
        message = Commit(lease, slots, blocks, tokens or token_ids(), parent)
        await self._client.call(message, Done, within_s=DIRECTORY_S)

    async def renew(self, lease: LeaseId) -> None:
        """Extend a lease by LEASE_S from now. Raises LeaseLost."""
        await self._client.call(Renew(lease), Done, within_s=DIRECTORY_S)

    async def release(self, lease: LeaseId, prefix: Sequence[BlockHash] = ()) -> None:
        """End a lease; ending one that is gone is no error. `prefix` counts as used now."""
        await self._client.call(Release(lease, list(prefix)), Done, within_s=DIRECTORY_S)

    async def discard(self, grants: list[Grant]) -> None:
        """Forget blocks that could not be read as they were written."""
        await self._client.call(Discard(grants), Done, within_s=DIRECTORY_S)

    async def catalogue(self, segment: SegmentId, after: int = -1) -> Catalogue:
        """What the directory believes that a segment holds, part by part."""
        return await self._client.call(GetCatalogue(segment, after), Catalogue, within_s=DIRECTORY_S)

    async def due(self, segment: SegmentId, limit: int) -> Due:
        """At most so many blocks of a segment that should be in the other tier too."""
        return await self._client.call(GetDue(segment, limit), Due, within_s=DIRECTORY_S)

    async def drain(self, segment: SegmentId, *, undo: bool = False) -> int:
        """Empty a segment, or no more; returns how many blocks it holds now. Raises CannotDrain."""
        return (await self._client.call(Drain(segment, undo), Counted, within_s=DIRECTORY_S)).blocks

    async def carry(self, ask: Carry) -> Carried:
        """Lease what is to be carried out of a segment that is drained. Raises PoolFull."""
        return await self._client.call(ask, Carried, within_s=DIRECTORY_S)

    async def clear(self) -> int:
        """Forget every block that no lease names, for good; returns how many. Raises Unconfirmed."""
        return (await self._client.call(Clear(), Cleared, within_s=NOTED_S + DIRECTORY_S)).blocks

    async def pin(
        self, blocks: list[BlockHash], kind: PinKind, for_s: float, tenant: TenantId | None = None
    ) -> int:
        """Keep blocks for `for_s` seconds; returns how many of the unbroken prefix are pinned now. Raises
        WrongTenant, as do the next two, if a tenant is named and a block is another's."""
        return (await self._client.call(Pin(blocks, kind, for_s, tenant), Counted, within_s=DIRECTORY_S)).blocks

    async def unpin(self, blocks: list[BlockHash], tenant: TenantId | None = None) -> int:
        """End pins; returns how many blocks had been pinned."""
        return (await self._client.call(Unpin(blocks, tenant), Counted, within_s=DIRECTORY_S)).blocks

    async def remove(self, blocks: list[BlockHash], tenant: TenantId | None = None) -> int:
        """Forget these blocks for good, but for those that a lease names; how many. Raises Unconfirmed."""
        asked = Remove(blocks, tenant)
        return (await self._client.call(asked, Counted, within_s=NOTED_S + DIRECTORY_S)).blocks

    async def segments(self) -> list[SegmentStats]:
        """Counts of blocks of each segment, in the order of joining."""
        return (await self._client.call(GetSegments(), Segments, within_s=DIRECTORY_S)).segments

    async def stats(self) -> Stats:
        """Counts of blocks."""
        return await self._client.call(GetStats(), Stats, within_s=DIRECTORY_S)

    async def tenant(self, tenant: TenantId) -> TenantStats:
        """How much one tenant has, and may have."""
        return await self._client.call(GetTenant(tenant), TenantStats, within_s=DIRECTORY_S)


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
