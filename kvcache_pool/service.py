"""The directory of the KVCache pool over rpc.

Every decision of the directory is one synchronous call into the index, so none is ever half made. Waiting,
time and logging are here; rules are not.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvcache_pool.api import (
    NOTED_S,
    NOTES_MAX,
    Acquire,
    Announce,
    Announced,
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
    GetTenant,
    Goodbye,
    Lease,
    Lookup,
    Pin,
    Release,
    Remove,
    Renew,
    Segments,
    Stats,
    TenantStats,
    Unconfirmed,
    Unpin,
)
from kvcache_pool.index import Index
from kvcache_pool.pins import PIN_S_MAX
from kvcache_pool.publisher import Publisher
from protocol.errors import BadMessage
from protocol.ids import BLOCK_HASH_BYTES, Incarnation, SegmentId, TenantId
from protocol.message import Message
from protocol.pause import sleep_unless_paused
from protocol.registry import Load
from protocol.rpc import Ask, Handler, at_once, handler

log = logging.getLogger("dango.kvcache")

SWEEP_EVERY_S = 0.5
"""How late an expired lease or a silent segment is noticed when nobody asks for anything."""

LEASE_S_MAX = 600.0
"""The longest lease that can be asked for: a holder that needs more renews, or is dead."""

NAME_CHARS_MAX = 256
"""Of a lease, an owner, a segment or an incarnation. The directory keeps them."""


class DirectoryService:
    """Answers for the index. Owns it; `sweep` must run beside the server. What a call has changed is published
    before its answer leaves, so nobody waits for a next call to hear of it."""

    def __init__(self, index: Index, publisher: Publisher | None = None) -> None:
        """The index records for the publisher's events, if there is one; both are another's to close."""
        self._index = index
        self._untold: dict[SegmentId, Incarnation] = {}
        """Segments that have joined and not brought their catalogue yet. As few as names of segments."""
        self._publisher = publisher
        self._waiting = 0
        """Calls that wait for segments."""
        self._stirred = asyncio.Event()
        """A segment has told something, or has been given up."""

    def handlers(self) -> dict[type[Message], Handler]:
        """For `Server`."""
        rows = dict(
            [
                at_once(Lookup, self._lookup),
                at_once(Exists, self._exists),
                at_once(Acquire, self._acquire),
                at_once(Commit, self._commit),
                at_once(Renew, self._renew),
                at_once(GetDue, self._due),
                at_once(Release, self._release),
                at_once(Discard, self._discard),
                handler(Clear, self._clear),
                at_once(Drain, self._drain),
                at_once(Carry, self._carry),
                at_once(Pin, self._pin),
                at_once(Unpin, self._unpin),
                handler(Remove, self._remove),
                at_once(GetStats, self._stats),
                at_once(GetTenant, self._tenant),
                at_once(GetSegments, self._segments),
                at_once(Announce, self._announce),
                at_once(Catalogue, self._catalogue),
                at_once(GetCatalogue, self._told_catalogue),
                at_once(Goodbye, self._goodbye),
            ]
        )
        if self._publisher is None:
            return rows
        return {kind: self._publisher.after(row) for kind, row in rows.items()}

    async def sweep(self) -> None:
        """End what is overdue, until cancelled."""
        while True:
            if not await sleep_unless_paused(SWEEP_EVERY_S):
                continue  # renewals and announcements lie unread
            now = _now()
            for claim in self._index.expire(now):
                log.warning("lease %s of %s expired unreleased", claim.lease, claim.owner)
            for segment in self._index.silent(now):
                log.warning("segment %s is silent: its blocks are given up", segment)
            self._stirred.set()
            self._index.settle()
            self._index.trim()
            if self._publisher is not None:
                self._publisher.publish()

    def load(self) -> Load:
        """Blocks of the whole pool, which this instance keeps the books of."""
        stats = self._index.stats()
        load = Load(
            blocks_total=stats.total,
            blocks_free=stats.free,
            blocks_leased=stats.leased,
            blocks_pending=stats.reserved,
            evicted=stats.evicted,
            tenants=stats.tenants,
            largest_tenant=stats.largest_tenant,
            over_quota=stats.over_quota,
        )
        return load if self._publisher is None else self._publisher.tell(load)

    def _lookup(self, message: Lookup) -> Found:
        return self._index.find(message.blocks)

    def _exists(self, message: Exists) -> Existing:
        return Existing([self._index.replicas(name) > 0 for name in message.blocks])

    def _acquire(self, message: Acquire) -> Lease:
        _require_lease_s(message.lease_s)
        _require_names(message.lease, message.owner)
        _require_tenants(message.tenant)
        if min(message.reuse, message.unnamed, message.copies) < 0:
            raise BadMessage("reuse, unnamed and copies count blocks: they are not negative")
        try:
            lease = self._index.acquire(message, _now())
        except ValueError as error:
            raise BadMessage(str(error)) from error
        return lease if self._publisher is None else replace(lease, wants_tokens=True)

    def _commit(self, message: Commit) -> Done:
        _require_hashes(message.blocks if message.parent is None else [*message.blocks, message.parent])
        try:
            if message.tokens and self._publisher is not None:
                self._publisher.events.tell(message.blocks, message.tokens, message.parent)
            self._index.commit(message.lease, message.slots, message.blocks, _now())
        except ValueError as error:
            raise BadMessage(str(error)) from error
        return Done()

    def _renew(self, message: Renew) -> Done:
        _require_lease_s(message.lease_s)
        self._index.renew(message.lease, message.lease_s, _now())
        return Done()

    def _due(self, message: GetDue) -> Due:
        if not 0 < message.limit <= NOTES_MAX:
            raise BadMessage(f"from 1 to {NOTES_MAX} blocks can be asked for, not {message.limit}")
        found = self._index.due(message.segment, message.limit)
        return Due(*([*column] for column in zip(*found, strict=True))) if found else Due([], [], [])

    def _release(self, message: Release) -> Done:
        self._index.release(message.lease, before=len(message.prefix))
        self._index.touch(message.prefix)
        return Done()

    def _discard(self, message: Discard) -> Done:
        count = self._index.discard(message.grants)
        log.warning("%d blocks were found bad and are forgotten", count)
        return Done()

    def _drain(self, message: Drain) -> Counted:
        count = self._index.drain(message.segment, undo=message.undo)
        log.info("segment %s is drained%s", message.segment, " no more" if message.undo else "")
        return Counted(count)

    def _carry(self, message: Carry) -> Carried:
        _require_names(message.lease, message.segment)
        if not 0 < message.limit <= NOTES_MAX:
            raise BadMessage(f"from 1 to {NOTES_MAX} blocks can be asked for, not {message.limit}")
        try:
            return self._index.carry(message, _now())
        except ValueError as error:
            raise BadMessage(str(error)) from error

    async def _clear(self, _message: Clear, _: Ask) -> Cleared:
        def clear() -> int:
            count = self._index.clear()
            left = self._index.stats()
            if self._publisher is not None and not left.cached + left.disk_cached:
                self._publisher.events.cleared()
            return count

        return Cleared(await self._forget(clear))

    async def _forget(self, forget: Callable[[], int]) -> int:
        """Forget blocks, and wait until the segments have noted it down: until then, the next life of one that is
        killed would bring them back. So would the catalogue of one that has just joined: it is heard first.
        Returns how many. Raises Unconfirmed."""
        end = _now() + NOTED_S
        await self._until(lambda: not self._unheard(), end)
        silent, before = self._unheard(), self._index.told()
        count = forget()
        if self._publisher is not None:
            self._publisher.publish()
        told = [one for one in self._index.told() if one not in before]
        await self._until(lambda: all(slots.left or slots.news.noted(last) for slots, last in told), end)
        silent += [slots.place.segment for slots, last in told if not slots.news.noted(last)]
        if silent:
            who = ", ".join(dict.fromkeys(silent))
            after = "which counts should the directory die"
            raise Unconfirmed(f"forgotten blocks: {count}; {who} did not confirm it, {after}")
        return count

    def _unheard(self) -> list[SegmentId]:
        """Segments that are there and have yet to bring their catalogue."""
        return [segment for segment in self._index.segments() if segment in self._untold]

    async def _until(self, look: Callable[[], bool], end: float) -> None:
        """Wait for what segments tell, until then at the longest."""
        self._waiting += 1
        try:
            async with asyncio.timeout_at(end):
                while not look():
                    self._stirred.clear()
                    await self._stirred.wait()
        except TimeoutError:
            return
        finally:
            self._waiting -= 1

    def _pin(self, message: Pin) -> Counted:
        if not 0.0 < message.for_s <= PIN_S_MAX:
            raise BadMessage(f"a pin lasts more than 0 and at most {PIN_S_MAX} s, not {message.for_s}")
        return Counted(self._index.pin(message.blocks, message.kind, _now() + message.for_s, message.tenant))

    def _unpin(self, message: Unpin) -> Counted:
        return Counted(self._index.unpin(message.blocks, message.tenant))

    async def _remove(self, message: Remove, _: Ask) -> Counted:
        return Counted(await self._forget(lambda: self._index.remove(message.blocks, message.tenant)))

    def _segments(self, _message: GetSegments) -> Segments:
        return Segments(self._index.segment_stats())

    def _stats(self, _message: GetStats) -> Stats:
        return self._index.stats()

    def _tenant(self, message: GetTenant) -> TenantStats:
        return self._index.tenant_stats(message.tenant)

    def _announce(self, message: Announce) -> Announced:
        place = message.place
        _require_names(place.segment, place.incarnation)
        if not 0 <= message.generation < 1 << 63:
            raise BadMessage(f"segment {place.segment} announces generation {message.generation}")
        try:
            joined = self._index.announce(place, message.generation, _now(), message.draining)
        except ValueError as error:
            raise BadMessage(str(error)) from error
        if joined:
            log.info("segment %s joins with %d blocks", place.segment, place.slots)
            self._untold[place.segment] = place.incarnation
        joined = self._untold.get(place.segment) == place.incarnation
        news, number = self._index.news(place.segment, 0 if joined else message.noted)
        self._stirred.set()
        more = bool(news) and (self._waiting > 0 or len(news) == NOTES_MAX)
        return Announced(joined, news, number, more, self._index.draining(place.segment))

    def _catalogue(self, message: Catalogue) -> Counted:
        if len(message.notes) > NOTES_MAX:
            raise BadMessage(f"a catalogue comes in parts of at most {NOTES_MAX} notes")
        _require_hashes(note.name for note in message.notes)
        _require_tenants(*(note.tenant for note in message.notes))
        count = self._index.adopt(message.segment, message.incarnation, message.notes)
        if message.last and self._untold.get(message.segment) == message.incarnation:
            del self._untold[message.segment]
            self._stirred.set()
        log.info("segment %s brings %d blocks, of %d noted", message.segment, count, len(message.notes))
        return Counted(count)

    def _told_catalogue(self, message: GetCatalogue) -> Catalogue:
        known = {one.segment: one.incarnation for one in self._index.segment_stats()}
        incarnation = known.get(message.segment)
        if incarnation is None:
            raise BadMessage(f"there is no segment {message.segment[:80]}")
        notes = self._index.catalogue(message.segment, message.after, NOTES_MAX)
        return Catalogue(message.segment, incarnation, notes)

    def _goodbye(self, message: Goodbye) -> Done:
        if self._index.leave(message.segment, message.incarnation):
            log.info("segment %s leaves", message.segment)
            self._stirred.set()
        return Done()


def _require_hashes(names: Iterable[bytes]) -> None:
    if any(len(name) != BLOCK_HASH_BYTES for name in names):
        raise BadMessage(f"a block's name has {BLOCK_HASH_BYTES} bytes")


def _require_tenants(*tenants: TenantId) -> None:
    if min(tenants, default=0) < 0:
        raise BadMessage("what stands for a tenant is not negative")


def _require_lease_s(lease_s: float) -> None:
    if not 0.0 < lease_s <= LEASE_S_MAX:
        raise BadMessage(f"a lease lasts more than 0 and at most {LEASE_S_MAX} s, not {lease_s}")


def _require_names(*names: str) -> None:
    if max(map(len, names)) > NAME_CHARS_MAX:
        raise BadMessage(f"a name has at most {NAME_CHARS_MAX} characters")


def _now() -> float:
    return asyncio.get_running_loop().time()
