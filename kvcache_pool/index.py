"""The directory's index: the stock of blocks, and who is using which. Pure: time comes in as `now`.

    name ──Replicas──────────> Block, a row of the tables of its segment <── claims of leases
                                 │
                               Slots of a segment: free list, idle blocks in order of eviction, pins

To the laws of the stock comes: a block that a lease names is neither evicted nor given to another. All costs are
O(blocks in the request).

A hot prefix spreads: whoever reads it in a segment that lacks it may ask for slots there, and commits what it
has read under the same names (the end of Mooncake's Algorithm 1, FAST'25, section 6). Such a block is a *copy*
as long as another segment has it too, and a segment gives only a share of its slots to copies, since each of
them takes the place of a block that nobody else has. When the others are gone it is a block like any other.

A tenant has at most a share of all memory, its copies included. At its quota, new blocks take the place of its own
idle ones (`rooms.py`), so it cannot push out another's.
"""

from collections import Counter
from itertools import islice

from kvcache_pool.api import (
    LEASE_S,
    Acquire,
    Carried,
    Carry,
    Copy,
    Lease,
    LeaseLost,
    PinKind,
    PoolFull,
    QuotaExceeded,
    Stats,
    WrongTenant,
)
from kvcache_pool.counts import stats_of
from kvcache_pool.draining import LOOKS_MAX, elsewhere, pass_pin, staying, target_for
from kvcache_pool.events import Recorder
from kvcache_pool.leases import QUARANTINE_S, Claim, Leases
from kvcache_pool.rooms import Room, copies_for, rooms_for, with_copies
from kvcache_pool.slots import DEFAULT_SHARES, Block, Shares, Slots
from kvcache_pool.stock import SEGMENT_SILENT_S, Stock
from protocol.ids import BlockHash, LeaseId, TenantId


class Index(Stock):
    """All blocks of the pool, and the leases on them. Every method mutates but those that find, count or check."""

    def __init__(
        self,
        shares: Shares = DEFAULT_SHARES,
        silent_s: float = SEGMENT_SILENT_S,
        generation: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        """See Stock."""
        super().__init__(shares, silent_s, generation, recorder)
        self._leases = Leases()

    # -- leases -------------------------------------------------------------------------------------

    def acquire(self, ask: Acquire, now: float) -> Lease:
        """Lease the cached prefix and room for the rest. Raises PoolFull, or of that QuotaExceeded; WrongTenant;
        ValueError for a lease's name that is taken or a block's that comes twice. Then nothing has changed."""
        self.expire(now)
        if ask.lease in self._leases:
            raise ValueError(f"there is a lease {ask.lease} already")
        if len(set(ask.blocks)) < len(ask.blocks):
            raise ValueError("a block is named twice: a prompt's names are a chain, so they all differ")
        near = self._segments.get(ask.near) if ask.near is not None else None
        sources = self._replicas.choose(ask.blocks[: ask.reuse], near)
        if any(block.home.tenants[block.slot] != ask.tenant for block in sources):
            self._require_tenant(ask.blocks, ask.tenant)
        if self._leases.full:
            raise PoolFull(f"{len(self._leases)} leases are out, and there may be no more")
        rooms = self._rooms(ask, near, sources)
        for block in sources:
            block.home.idle.drop(block.slot)
            block.leases += 1
            block.home.count_reading(block.slot)
        for room in rooms:
            self._evict_own(room.slots, ask.tenant, room.own)
        targets = [block for room in rooms for block in self._reserve(room.slots, room.new, ask.tenant)]
        copies = self._copies(ask, near, sources)
        blocks = [*with_copies(sources, copies), *targets]
        committable = [*targets, *copies.values()]
        pairs = [(sources[source], copy) for source, copy in copies.items()]
        self._leases.grant(Claim(ask.lease, ask.owner, now + ask.lease_s, blocks, committable, pairs, ask.moves))
        homes = {block.home: None for block in blocks}
        return Lease(
            ask.lease,
            [block.grant for block in sources],
            [block.grant for block in targets],
            [slots.place for slots in homes],
            [Copy(source, block.grant) for source, block in copies.items()],
        )

    def _rooms(self, ask: Acquire, near: Slots | None, sources: list[Block]) -> list[Room]:
        """Where the new blocks go, within the pool and the tenant's quota, which disks do not count for. Raises
        PoolFull."""
        count = len(ask.blocks) - len(sources) + ask.unnamed
        saved = near is not None and near.on_disk
        over = 0 if saved else self._tenants.over(ask.tenant, count)
        try:
            return rooms_for(count, self._segments, ask.near, sources, ask.tenant, over)
        except QuotaExceeded:
            self._tenants.refused += 1
            raise

    def _copies(self, ask: Acquire, near: Slots | None, sources: list[Block]) -> dict[int, Block]:
        """Room near the asker for sources that are elsewhere; as far as it goes, in their order. At its quota the
        tenant gives up others of its own there for them."""
        if near is None or not ask.copies:
            return {}
        left = self._tenants.left(ask.tenant)
        most = max(0, min(ask.copies, left + near.idle.own(ask.tenant)))
        copied = copies_for(most, near, sources, moves=ask.moves)
        if copied:
            self._evict_own(near, ask.tenant, len(copied) - left)
        reserved = self._reserve(near, len(copied), ask.tenant, copy=not ask.moves)
        return dict(zip(copied, reserved, strict=True))

    def carry(self, ask: Carry, now: float) -> Carried:
        """Lease some blocks of a segment that is drained, what was used last first, and room for them elsewhere.
        What gets no room is forgotten, if it may be: see draining.py. Raises PoolFull when there may be no more
        leases, or ValueError for a lease's name that is taken; then nothing has changed."""
        self.expire(now)
        if ask.lease in self._leases:
            raise ValueError(f"there is a lease {ask.lease} already")
        if self._leases.full:
            raise PoolFull(f"{len(self._leases)} leases are out, and there may be no more")
        slots = self._segments.get(ask.segment)
        pairs = self._outgoing(slots, ask) if slots is not None else []
        for source, _ in pairs:
            source.home.idle.drop(source.slot)
            source.leases += 1
        blocks = [block for pair in pairs for block in pair]
        if pairs:
            targets = [target for _, target in pairs]
            owner = f"the drain of {ask.segment}"
            self._leases.grant(Claim(ask.lease, owner, now + LEASE_S, blocks, targets, pairs, moves=True))
        return Carried(
            [name for source, _ in pairs if (name := source.name) is not None],
            [source.grant for source, _ in pairs],
            [target.grant for _, target in pairs],
            [home.place for home in {block.home: None for block in blocks}],
        )

    def _outgoing(self, slots: Slots, ask: Carry) -> list[tuple[Block, Block]]:
        """Blocks that leave a segment, and the room that is reserved for each; some may be forgotten instead."""
        stay = staying(self._segments.values())
        able = [one for one in stay if one.place.segment not in ask.avoid]
        pairs: list[tuple[Block, Block]] = []
        planned = Counter[Slots]()
        for slot in [*islice(slots.leaving, LOOKS_MAX)]:
            if len(pairs) == ask.limit or not stay:
                break
            block = Block(slots, slot)
            if elsewhere(block, self._replicas.named(block)) is not None:
                del slots.leaving[slot]
                slots.moved[slot] = None
                continue
            last, at_quota = pairs[-1][1].home if pairs else None, self._tenants.left(block.tenant) <= 0
            target = target_for(block, able, last, planned, at_quota=at_quota)
            if target is not None:
                planned[target] += slots.idle.kind(slot) is PinKind.HARD
                if at_quota and not target.free and target.idle.next_own(block.tenant) is not None:
                    self._evict_own(target, block.tenant, 1)
                pairs.append((block, self._reserve(target, 1, block.tenant)[0]))
            elif block.leases or slots.idle.kind(slot) is not None or len(able) < len(stay):
                slots.leaving.move_to_end(slot)
            else:
                self._forget(block)
                self._evicted += 1
        return pairs

    def commit(self, lease: LeaseId, targets: list[int], blocks: list[BlockHash], now: float) -> None:
        """Publish written targets. Raises LeaseLost, WrongTenant, or ValueError if these targets were never
        granted; then nothing has changed.

        A name that its segment has already is not given twice: the later copy stays private.
        """
        self.expire(now)
        claim = self._current(lease)
        if len(targets) != len(blocks) or not all(0 <= target < len(claim.targets) for target in targets):
            raise ValueError(f"{lease} has {len(claim.targets)} targets")
        self._require_own([claim.targets[target] for target in targets], blocks)
        for target, name in zip(reversed(targets), reversed(blocks), strict=True):
            self._publish(claim.targets[target], name)
        for source, copy in claim.copies if claim.moves else []:
            if copy.name is not None and copy.name == source.name:
                self._move(source, copy)

    def _require_own(self, targets: list[Block], blocks: list[BlockHash]) -> None:
        """Raises WrongTenant if a target is one tenant's and its name another's."""
        owners: dict[BlockHash, TenantId] = {}
        for target, name in zip(targets, blocks, strict=True):
            cached = self._replicas.tenant(name)
            if owners.setdefault(name, target.tenant if cached is None else cached) != target.tenant:
                raise WrongTenant(f"block {name[:8].hex()}... is another tenant's")

    def _move(self, source: Block, copy: Block) -> None:
        """A block is in its new place. Its pin goes with it, its age, and what it was when it was not used."""
        home = source.home
        pass_pin(source, copy)
        copy.home.uses[copy.slot] = home.uses[source.slot]
        home.leaving.pop(source.slot, None)
        home.moved[source.slot] = None

    def renew(self, lease: LeaseId, lease_s: float, now: float) -> None:
        """Extend a lease. Raises LeaseLost."""
        self.expire(now)
        if not self._leases.renew(lease, now + lease_s):
            self._current(lease)

    def release(self, lease: LeaseId, before: int = 0) -> None:
        """End a lease: its named blocks become idle, the others free. One that is gone is no error. `before`
        counts the blocks of the prompt that come before the lease's."""
        claim = self._leases.end(lease)
        if claim is None:
            return
        carried = claim.moves and any(source.home.draining for source, _ in claim.copies)
        self._let_go(claim.blocks, before, used=not carried)
        for source, copy in claim.copies:
            if copy.name is None:
                continue
            if not carried:
                source.home.idle.demote(source.slot)
                continue
            behind = source.home.behind.setdefault(copy.home.number, {})
            last = next(reversed(behind.values()), None)
            copy.home.idle.tuck(copy.slot, last, behind.pop(copy.tenant, None))
            behind[copy.tenant] = copy.slot

    def expire(self, now: float) -> list[Claim]:
        """End the pins and leases whose time is over; returns the leases. What was reserved for them is
        quarantined first."""
        for slots in self._segments.values():
            slots.idle.end_pins(now, slots.names)
        overdue = self._leases.overdue(now)
        for claim in overdue:
            self._let_go([block for block in claim.blocks if block.name is not None or block.lost])
            claim.blocks = [block for block in claim.blocks if block.name is None and not block.lost]
            if claim.blocks:  # so there are never more late leases than slots
                self._leases.linger(claim, now + QUARANTINE_S)
        for claim in self._leases.lapsed(now):
            self._let_go(claim.blocks)
        return overdue

    def _let_go(self, blocks: list[Block], before: int = 0, *, used: bool = True) -> None:
        """One lease less names these, which is a use of them, unless they were only carried."""
        self._uses += 1
        tiered = used and self._replicas.tiered
        for position in range(len(blocks) - 1, -1, -1):  # the front of a prefix becomes the last to be evicted
            block = blocks[position]
            home, slot = block.home, block.slot
            home.leases[slot] -= 1
            if tiered and home.names[slot] is not None and not home.on_disk and not home.left:
                for saved in self._replicas.saved(block):  # what is hot in memory stays on disk
                    if saved.leases == 0:
                        saved.touch(before + position)
            if used:
                home.uses[slot] = self._uses
            if home.leases[slot] == 0 and not home.left:
                name = home.names[slot]
                if name is not None:
                    home.idle.touch(slot, name, before + position)
                else:
                    home.give(block)

    def _current(self, lease: LeaseId) -> Claim:
        claim = self._leases.find(lease)
        if claim is None:
            raise LeaseLost(f"the lease {lease[:80]} has ended")
        return claim

    # -- counting -----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counts of blocks over all segments."""
        return stats_of(self.segment_stats(), len(self._leases), self._evicted, self._tenants)

    def check(self) -> None:
        """Asserts every law of this file and of the stock. O(all blocks)."""
        super().check()
        self._leases.check()
        counts, used = self._leases.counts(), [*self._used()]
        assert all(block.leases == counts.get(block, 0) for block in used)
        assert all(block.lost for block in counts.keys() - set(used))
