"""Tenants: what one may have of the pool, whose blocks go for it, and that nobody touches another's."""

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache_pool.api import (
    CannotDrain,
    Carry,
    Grant,
    Note,
    PinKind,
    PoolFull,
    QuotaExceeded,
    TenantStats,
    WrongTenant,
    new_lease,
)
from kvcache_pool.eviction import EVICTIONS
from kvcache_pool.index import Index
from kvcache_pool.leases import QUARANTINE_S
from kvcache_pool.slots import Shares
from protocol.ids import NO_TENANT, BlockHash, Incarnation, SegmentId, TenantId, tenant_id
from tests.kvcache_pool.builders import a_place, an_ask, an_index, cache, copy, names
from tests.kvcache_pool.test_tiers import DISK, KV, a_disk

A, B = tenant_id("a"), tenant_id("b")


def cached(index: Index, tenant: TenantId | None = None) -> set[int]:
    """The numbers of the blocks that memory has, of one tenant or of all."""
    numbers = {int.from_bytes(name, "big") for name, place, _ in index.named() if place.segment != DISK}
    return {number for number in numbers if tenant in (None, owner(index, number))}


def owner(index: Index, number: int) -> TenantId | None:
    return index._replicas.tenant(names(number)[0])


def refused(
    index: Index, why: type[Exception] = QuotaExceeded, match: str = "wanted|tenant's", **ask: object
) -> None:
    """This ask is refused, and changes nothing."""
    blocks, tenant = ask.pop("blocks", []), ask.pop("tenant", A)
    before = state(index)
    with pytest.raises(why, match=match):
        index.acquire(an_ask(blocks, tenant=tenant, **ask), 0.0)
    assert state(index) == before
    index.check()


def state(index: Index) -> tuple[object, ...]:
    orders = [[*slots.idle] for slots in index._segments.values()]
    stats = replace(index.stats(), over_quota=0)
    return stats, sorted(index.named(), key=str), orders, index.tenant_stats(A), index.tenant_stats(B)


def test_a_tenants_id_is_the_same_everywhere_and_none_is_none() -> None:
    assert tenant_id("") == NO_TENANT == 0
    assert tenant_id("team-a") == 0xB4DFD1516C88C296, "it is in the files of segments"


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_at_its_quota_a_tenant_makes_room_of_its_own_the_oldest_first(eviction: str) -> None:
    index = an_index(kv=8, tenant_share=0.5, eviction=eviction)
    cache(index, 10, 11, tenant=B)  # the first to go in any order of the whole pool
    for number in (1, 2, 3, 4):
        cache(index, number, tenant=A)
    assert index.tenant_stats(A) == TenantStats(4, 4)
    cache(index, 5, 6, tenant=A)
    index.check()
    assert cached(index, A) == {3, 4, 5, 6}
    assert cached(index, B) == {10, 11}
    assert index.stats().free == 2, "also where others' room is free"


def test_of_a_prefix_its_end_goes_before_its_front() -> None:
    index = an_index(kv=8, tenant_share=0.5)
    cache(index, 1, 2, 3, tenant=A)
    cache(index, 7, tenant=A)
    cache(index, 8, 9, tenant=A)
    assert cached(index) == {1, 7, 8, 9}


def test_a_full_pool_gives_a_tenant_at_its_quota_nothing_of_others() -> None:
    index = an_index(kv=4, tenant_share=0.5)
    cache(index, 10, 11, tenant=B)
    cache(index, 1, 2, tenant=A)
    for number in range(3, 9):
        cache(index, number, tenant=A)
        assert cached(index, B) == {10, 11}
    assert cached(index, A) == {7, 8}
    index.check()


def test_below_its_quota_all_is_as_without_one() -> None:
    index = an_index(kv=4, tenant_share=0.75)
    cache(index, 10, 11, 12, tenant=B)
    cache(index, 1, tenant=A)
    cache(index, 2, 3, tenant=A)  # the oldest of all go: B's
    assert (cached(index, A), cached(index, B)) == ({1, 2, 3}, {10})


def test_an_ask_that_crosses_the_quota_takes_of_others_what_it_may_still_have() -> None:
    index = an_index(kv=6, tenant_share=0.5)
    cache(index, 10, 11, 12, 13, tenant=NO_TENANT)
    cache(index, 1, 2, tenant=A)
    cache(index, 3, 4, tenant=A)
    assert cached(index, A) == {1, 3, 4}, "one of its own went, the end of its prefix"
    assert cached(index, NO_TENANT) == {10, 11, 12}, "and one of another's"
    index.check()


def test_who_names_no_tenant_has_no_quota() -> None:
    index = an_index(kv=4, tenant_share=0.25)
    cache(index, 1, 2, 3, 4)
    assert index.tenant_stats(NO_TENANT) == TenantStats(4, None)
    assert (index.stats().tenants, index.stats().largest_tenant) == (0, 0)


def test_a_quota_smaller_than_one_request_refuses_it_as_a_full_pool_does() -> None:
    index = an_index(kv=8, tenant_share=0.25)
    cache(index, 1, 2, tenant=A)
    refused(index, match="3 blocks wanted, 2 can be had within the tenant's quota", unnamed=3)
    refused(index, PoolFull, unnamed=3)
    assert index.stats().over_quota == 2
    assert len(index.acquire(an_ask([], unnamed=2, tenant=A), 0.0).targets) == 2
    index.check()


def test_a_pool_of_one_block_serves_each_tenant_in_turn() -> None:
    index = an_index(kv=1, tenant_share=0.01)
    for tenant, number in ((A, 1), (B, 2), (A, 3), (A, 4)):
        lease = index.acquire(an_ask(names(number), tenant=tenant), 0.0)
        refused(index, tenant=tenant, unnamed=1)
        index.commit(lease.lease, [0], names(number), 0.0)
        index.release(lease.lease)
        index.check()
        assert cached(index, tenant) == cached(index) == {number}


def test_what_is_leased_reserved_or_pinned_hard_cannot_go_and_what_is_pinned_softly_goes_last() -> None:
    index = an_index(kv=12, tenant_share=0.5)
    cache(index, 20, 21, tenant=B)
    for number in (1, 2, 3, 4):
        cache(index, number, tenant=A)
    held = index.acquire(an_ask(names(1), unnamed=2, tenant=A), 0.0)
    assert index.pin(names(2), PinKind.HARD, 9.0, A) == 1
    assert index.pin(names(3), PinKind.SOFT, 9.0, A) == 1
    refused(index, match="3 blocks wanted, 2 can be had", unnamed=3)
    one = index.acquire(an_ask([], unnamed=1, tenant=A), 0.0)
    assert cached(index, A) == {1, 2, 3}, "the one without a pin first"
    two = index.acquire(an_ask([], unnamed=1, tenant=A), 0.0)
    assert cached(index, A) == {1, 2}
    refused(index, unnamed=1)
    index.unpin(names(2), A)
    index.release(index.acquire(an_ask([], unnamed=1, tenant=A), 0.0).lease)
    assert cached(index, A) == {1}
    for lease in (held, one, two):
        index.release(lease.lease)
    assert index.tenant_stats(A) == TenantStats(1, 6)
    assert cached(index, B) == {20, 21}
    index.check()


def test_a_soft_pin_outlasts_what_was_used_after_it_and_what_was_copied_elsewhere_goes_first() -> None:
    index = an_index(a=4, b=4, tenant_share=0.5)
    cache(index, 1, tenant=A, near="a")
    index.pin(names(1), PinKind.SOFT, 9.0, A)
    cache(index, 2, tenant=A, near="a")
    cache(index, 3, tenant=A, near="a")
    copy(index, 3, near="b", tenant=A)
    for number, left in ((4, {"a": {1, 2, 4}, "b": {3}}), (5, {"a": {1, 4, 5}, "b": {3}})):
        cache(index, number, tenant=A, near="a")
        assert {segment: {n for n in range(9) if segment in index.find(names(n)).held} for segment in "ab"} == left
    index.check()


def test_the_prefix_that_an_ask_names_does_not_go_for_its_rest() -> None:
    index = an_index(kv=8, tenant_share=0.5)
    cache(index, 1, 2, 3, tenant=A)
    cache(index, 7, tenant=A)
    refused(index, match="2 blocks wanted, 1 can be had", blocks=names(1, 2, 3), unnamed=2)
    lease = index.acquire(an_ask(names(1, 2, 3), unnamed=1, tenant=A), 0.0)
    assert (len(lease.sources), cached(index)) == (3, {1, 2, 3})


def test_room_comes_back_with_a_lease_a_quarantine_and_a_discard() -> None:
    index = an_index(kv=4, tenant_share=0.5)
    index.acquire(an_ask([], unnamed=2, lease_s=1.0, tenant=A), 0.0)
    index.expire(1.0)
    assert index.tenant_stats(A).blocks == 2, "a late writer's blocks are still its own"
    index.expire(1.0 + QUARANTINE_S)
    assert index.tenant_stats(A).blocks == 0
    grants = cache(index, 1, 2, tenant=A, now=99.0).targets
    assert index.discard(grants[:1]) == 1
    assert index.tenant_stats(A).blocks == 1
    assert index.clear() == 1
    assert (index.tenant_stats(A).blocks, index.stats().tenants) == (0, 0)
    index.check()


def test_over_several_segments_no_other_tenants_block_goes_for_it_wherever_the_room_is() -> None:
    index = an_index(a=2, b=4, tenant_share=0.5)
    cache(index, 10, 11, tenant=B, near="a")
    cache(index, 1, 2, 3, tenant=A, near="b")
    cache(index, 12, tenant=B, near="b")
    lease = cache(index, 4, 5, tenant=A, near="a")
    assert [grant.segment for grant in lease.targets] == ["b", "b"], "where its own go, though it is not near"
    assert (cached(index, A), cached(index, B)) == ({1, 4, 5}, {10, 11, 12})
    index.check()


def test_new_blocks_are_near_where_something_of_its_own_is_there() -> None:
    index = an_index(a=3, b=3, tenant_share=0.5)
    cache(index, 1, 2, tenant=A, near="a")
    cache(index, 3, tenant=A, near="b")
    lease = cache(index, 4, 5, tenant=A, near="a")
    assert [grant.segment for grant in lease.targets] == ["a", "a"]
    assert cached(index) == {3, 4, 5}
    index.check()


def test_copies_count_and_take_the_place_of_the_tenants_own() -> None:
    index = an_index(a=4, b=4, tenant_share=0.5, copies_share=1.0)
    cache(index, 10, 11, tenant=B, near="b")
    cache(index, 1, 2, tenant=A, near="a")
    assert len(copy(index, 1, 2, near="b", tenant=A).copies) == 2
    assert (index.tenant_stats(A).blocks, index.stats().copies) == (4, 2)
    cache(index, 3, 4, tenant=A, near="b")
    index.check()
    assert index.find(names(10, 11)).reach == 2
    assert index.tenant_stats(A).blocks == 4
    at_quota = an_index(a=4, b=4, tenant_share=0.5, copies_share=1.0)
    cache(at_quota, 10, 11, tenant=B, near="b")
    cache(at_quota, 8, 9, tenant=A, near="b")
    cache(at_quota, 1, 2, tenant=A, near="a")
    lease = copy(at_quota, 1, 2, near="b", tenant=A)
    assert len(lease.copies) == 2
    assert (cached(at_quota, A), cached(at_quota, B)) == ({1, 2}, {10, 11})
    held = at_quota.acquire(an_ask(names(1), near="a", tenant=A, copies=1), 0.0)
    assert held.copies == []
    at_quota.check()


def test_copies_that_the_quota_has_no_room_for_are_no_reason_to_refuse() -> None:
    index = an_index(a=4, b=4, tenant_share=0.25, copies_share=1.0)
    cache(index, 1, 2, tenant=A, near="a")
    lease = index.acquire(an_ask(names(1, 2), near="b", copies=2, tenant=A), 0.0)
    assert (len(lease.sources), lease.copies) == (2, [])
    index.check()


def test_a_pool_that_shrinks_leaves_a_tenant_what_it_has_and_gives_it_no_more() -> None:
    index = an_index(a=4, b=4, tenant_share=0.5)
    cache(index, 1, 2, 3, 4, tenant=A, near="a")
    assert index.leave(SegmentId("b"), Incarnation("a"))
    index.check()
    assert index.tenant_stats(A) == TenantStats(4, 2)
    lease = index.acquire(an_ask(names(1, 2, 3), tenant=A), 0.0)
    assert len(lease.sources) == 3, "who only reads is not bound"
    refused(index, match="1 blocks wanted, 0 can be had", unnamed=1)
    index.release(lease.lease)
    cache(index, 5, tenant=A)
    assert cached(index) == {1, 5}
    index.check()


def test_a_segment_that_leaves_takes_its_blocks_from_the_count() -> None:
    index = an_index(a=4, b=4, tenant_share=0.5)
    cache(index, 1, 2, tenant=A, near="a")
    lease = index.acquire(an_ask(names(3), near="a", tenant=A), 0.0)
    index.leave(SegmentId("a"), Incarnation("a"))
    assert index.tenant_stats(A) == TenantStats(0, 2)
    index.release(lease.lease)
    index.check()


def test_after_a_restart_blocks_are_their_tenants_again() -> None:
    index = an_index(kv=4, tenant_share=0.5)
    cache(index, 1, 2, tenant=A)
    cache(index, 3, tenant=B)
    cache(index, 4)
    told, _ = index.news(KV, 0)
    assert {note.tenant for note in told} == {A, B, NO_TENANT}
    again = Index(Shares(tenant=0.5))
    again.announce(a_place("kv", 4), 1 << 40, 0.0)
    assert again.adopt(KV, Incarnation("a"), told) == 4
    again.check()
    assert [again.tenant_stats(tenant).blocks for tenant in (A, B)] == [2, 1]
    assert again.catalogue(KV, -1, 9) == sorted(told, key=lambda note: note.slot)
    refused(again, WrongTenant, blocks=names(3))
    cache(again, 5, tenant=A)
    assert (cached(again, A), cached(again, B)) == ({1, 5}, {3})


def test_a_note_under_anothers_name_is_not_taken() -> None:
    index = an_index(a=2, b=2, tenant_share=0.5)
    cache(index, 1, tenant=A, near="a")
    assert index.adopt(SegmentId("b"), Incarnation("a"), [Note(0, 5, names(1)[0], B)]) == 0
    assert index.adopt(SegmentId("b"), Incarnation("a"), [Note(0, 5, names(1)[0], A)]) == 1
    index.check()


# -- another tenant's -------------------------------------------------------------------------------


def test_another_tenants_block_is_no_source_whoever_asks() -> None:
    index = an_index(kv=4)
    cache(index, 1, 2, tenant=A)
    cache(index, 3)
    refused(index, WrongTenant, "another tenant's", blocks=names(1), tenant=B)
    refused(index, WrongTenant, "another tenant's", blocks=names(1), tenant=NO_TENANT)
    refused(index, WrongTenant, "another tenant's", blocks=names(3), tenant=A)
    assert len(index.acquire(an_ask(names(1, 2), tenant=A), 0.0).sources) == 2


def test_another_tenants_name_is_not_committed() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, tenant=A, near="a")
    lease = index.acquire(an_ask([], unnamed=2, near="b", tenant=B), 0.0)
    before = state(index)
    with pytest.raises(WrongTenant):
        index.commit(lease.lease, [0, 1], names(7, 1), 0.0)
    assert state(index) == before
    index.commit(lease.lease, [0], names(7), 0.0)
    assert owner(index, 7) == B
    index.check()


def test_who_names_a_tenant_pins_unpins_and_removes_only_that_ones_and_who_names_none_all() -> None:
    index = an_index(kv=4)
    cache(index, 1, tenant=A)
    cache(index, 2, tenant=B)
    assert index.pin(names(1), PinKind.HARD, 9.0, A) == 1
    before = state(index)
    for tenant in (B, NO_TENANT):
        for change in (
            lambda tenant: index.pin(names(1), PinKind.SOFT, 9.0, tenant),
            lambda tenant: index.unpin(names(2, 1), tenant),
            lambda tenant: index.remove(names(2, 1), tenant),
        ):
            with pytest.raises(WrongTenant):
                change(tenant)
            assert state(index) == before
    assert index.unpin(names(1, 9), A) == 1
    assert index.pin(names(1, 2), PinKind.SOFT, 9.0) == 2
    assert index.unpin(names(1, 2)) == 2
    assert index.remove(names(1, 2)) == 2
    index.check()


# -- the disk tier ----------------------------------------------------------------------------------


def an_index_with_disk(share: float, memory: int = 4) -> Index:
    index = an_index(kv=memory, tenant_share=share)
    index.announce(a_disk(16), 0, 0.0)
    return index


def carry(index: Index, source: SegmentId, target: SegmentId, limit: int = 100) -> list[int]:
    """As Carrier does. Returns the numbers of what was carried."""
    due = index.due(source, limit)
    for tenant in dict.fromkeys(tenant for *_, tenant in due):
        part = [name for name, _, of in due if of == tenant]
        lease = index.acquire(an_ask(part, near=target, reuse=0, tenant=tenant), 0.0)
        index.commit(lease.lease, [*range(len(part))], part, 0.0)
        index.release(lease.lease)
    index.check()
    return sorted(int.from_bytes(name, "big") for name, *_ in due)


def test_a_disk_knows_whose_its_blocks_are_and_counts_for_no_quota() -> None:
    index = an_index_with_disk(0.5)
    for number in (1, 2, 3, 4, 5):
        cache(index, number, tenant=A)
        assert carry(index, KV, DISK) == [number]
    assert index.stats().disk_cached == 5
    assert index.tenant_stats(A) == TenantStats(2, 2)
    refused(index, WrongTenant, blocks=names(1), tenant=B)
    assert index.acquire(an_ask(names(1), tenant=A), 0.0).sources[0].segment == DISK


def test_what_comes_back_from_disk_takes_the_place_of_its_tenants_own() -> None:
    index = an_index_with_disk(0.5)
    cache(index, 10, 11, tenant=B)
    for number in (1, 2, 3):
        cache(index, number, tenant=A)
        carry(index, KV, DISK)
    for _ in range(2):
        index.release(index.acquire(an_ask(names(1), tenant=A), 0.0).lease)
    assert carry(index, DISK, KV) == [1]
    assert (cached(index, A), cached(index, B)) == ({1, 3}, {10, 11})


def test_a_tenant_without_room_is_in_no_others_way_back_from_disk() -> None:
    index = an_index_with_disk(0.5)
    for tenant, numbers in ((A, (1, 2, 3, 4)), (B, (11, 12, 13))):
        for number in numbers:
            cache(index, number, tenant=tenant)
            carry(index, KV, DISK)
    for number, tenant in ((1, A), (2, A), (11, B)):
        for _ in range(2):
            index.release(index.acquire(an_ask(names(number), tenant=tenant), 0.0).lease)
    held = index.acquire(an_ask(names(3, 4), tenant=A), 0.0)
    assert index.due(DISK, 1) == []
    assert index.due(DISK, 1) == []
    assert carry(index, DISK, KV, 1) == [11], "those that had no room are due after it"
    index.release(held.lease)
    assert carry(index, DISK, KV, 9) == [1, 2]
    index.check()


# -- any history ------------------------------------------------------------------------------------

TENANTS = (NO_TENANT, A, B)
NUMBERS = {tenant: range(10 * n, 10 * n + 6) for n, tenant in enumerate(TENANTS)}
"""As honest names are: each is one tenant's."""


class Tenancy(RuleBasedStateMachine):
    """No history of leases makes a tenant exceed its quota, or take for it what another has; and none of drains
    takes for it what another has, but for pins."""

    @initialize(eviction=st.sampled_from(sorted(EVICTIONS)), share=st.sampled_from([0.1, 0.3, 0.5, 0.8]))
    def begin(self, eviction: str, share: float) -> None:
        self.index = an_index(a=4, b=3, c=2, eviction=eviction, tenant_share=share, copies_share=0.5)
        self.now = 0.0
        self.lives = 0
        self.leases: list[tuple[str, TenantId, int]] = []

    def blocks(self) -> dict[tuple[BlockHash, str], TenantId | None]:
        return {(name, place.segment): self.index._replicas.tenant(name) for name, place, _ in self.index.named()}

    @rule(
        tenant=st.sampled_from(TENANTS),
        chain=st.lists(st.integers(0, 5), max_size=5, unique=True),
        unnamed=st.integers(0, 2),
        near=st.sampled_from([None, "a", "b"]),
        copies=st.integers(0, 3),
        moves=st.booleans(),
    )
    def acquire(
        self, tenant: TenantId, chain: list[int], unnamed: int, near: str | None, copies: int, moves: bool
    ) -> None:
        self.index.expire(self.now)
        blocks = names(*(NUMBERS[tenant][number] for number in chain))
        before, held, stats = self.blocks(), self.index.tenant_stats(tenant), state(self.index)
        try:
            ask = an_ask(blocks, unnamed=unnamed, near=near, copies=copies, moves=moves, tenant=tenant)
            lease = self.index.acquire(ask, self.now)
        except PoolFull:
            assert state(self.index) == stats
            return
        new = len(lease.targets) + len(lease.copies)
        gone = Counter(of for key, of in before.items() if key not in self.blocks())
        others = gone.total() - gone[tenant]
        if held.quota is not None:
            left = held.quota - held.blocks
            assert others <= max(0, left), "others' blocks went for what is beyond the quota"
            assert self.index.tenant_stats(tenant).blocks <= (held.quota if new else held.blocks)
        assert others <= new
        self.leases.append((lease.lease, tenant, new))

    @rule(data=st.data(), chain=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    def commit(self, data: st.DataObject, chain: list[int]) -> None:
        if self.leases:
            lease, tenant, new = data.draw(st.sampled_from(self.leases))
            blocks = names(*(NUMBERS[tenant][number] for number in chain[:new]))
            if lease in self.index._leases._current:
                self.index.commit(lease, [*range(len(blocks))], blocks, self.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            chosen = data.draw(st.sampled_from(self.leases))
            self.leases.remove(chosen)
            self.index.release(chosen[0])

    @rule(tenant=st.sampled_from(TENANTS), number=st.integers(0, 5), kind=st.sampled_from(PinKind))
    def pin(self, tenant: TenantId, number: int, kind: PinKind) -> None:
        self.index.pin(names(NUMBERS[tenant][number]), kind, self.now + 30.0, tenant)

    @rule(tenant=st.sampled_from(TENANTS), number=st.integers(0, 5))
    def lie(self, tenant: TenantId, number: int) -> None:
        """Of another's block, cached or not."""
        before = state(self.index)
        liar = TENANTS[TENANTS.index(tenant) - 1]
        name = names(NUMBERS[tenant][number])
        if self.index.find(name).reach:
            for lie in (
                lambda: self.index.acquire(an_ask(name, tenant=liar), self.now),
                lambda: self.index.unpin(name, liar),
                lambda: self.index.remove(name, liar),
            ):
                with pytest.raises(WrongTenant):
                    lie()
        assert state(self.index) == before

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        known: list[Grant] = [grant for *_, grant in self.index.named()]
        if known:
            self.index.discard([data.draw(st.sampled_from(known))])

    @rule(seconds=st.sampled_from([5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)

    @rule(segment=st.sampled_from("abc"), undo=st.booleans())
    def drain(self, segment: str, undo: bool) -> None:
        with contextlib.suppress(CannotDrain):
            self.index.drain(SegmentId(segment), undo=undo)

    @rule(segment=st.sampled_from("abc"), commit=st.booleans())
    def carry(self, segment: str, commit: bool) -> None:
        """One block."""
        self.index.expire(self.now)
        slots = self.index._segments[SegmentId(segment)]
        before = self.blocks()
        counts = {tenant: self.index.tenant_stats(tenant) for tenant in TENANTS}
        pinned = {name for slot, name in enumerate(slots.names) if slots.idle.kind(slot) is not None}
        ask = Carry(new_lease(), SegmentId(segment), 1, [])
        carried = self.index.carry(ask, self.now)
        gone = [
            of for (name, where), of in before.items() if where != segment and (name, where) not in self.blocks()
        ]
        if not carried.blocks:
            assert not gone
            assert not slots.draining or all(slots.leases[slot] or slots.idle.kind(slot) for slot in slots.leaving)
            return
        tenant = self.index._replicas.tenant(carried.blocks[0])
        assert tenant is not None
        had = counts[tenant]
        if had.quota is not None and had.blocks >= had.quota and carried.blocks[0] not in pinned:
            assert {*gone} <= {tenant}, "another's block went for what is beyond the quota"
        assert self.index.tenant_stats(tenant).blocks == had.blocks + 1 - gone.count(tenant)
        if commit:
            self.index.commit(ask.lease, [0], carried.blocks, self.now)
        self.index.release(ask.lease)

    @rule()
    def note(self) -> None:
        """All segments note down what they hear."""
        for segment in self.index.segments():
            number = -1
            while (told := self.index.news(segment, number))[0]:
                number = told[1]
        self.index.settle()

    @rule(segment=st.sampled_from(["a", "b"]))
    def restart(self, segment: str) -> None:
        """With what it has noted; perhaps fewer slots are left for a while, so the quota is smaller."""
        noted = self.index.catalogue(SegmentId(segment), -1, 99)
        self.lives += 1
        life = f"life {self.lives}"
        self.index.announce(a_place(segment, 4 if segment == "a" else 3, life), 0, self.now)
        self.index.adopt(SegmentId(segment), Incarnation(life), noted)

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "index"):
            self.index.check()

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.expire(self.now + 100.0)
            self.index.expire(self.now + 200.0)
            for lease, _, _ in self.leases:
                self.index.release(lease)
            for tenant in TENANTS:
                for number in NUMBERS[tenant]:
                    self.index.unpin(names(number))
            for segment in self.index.segments():
                self.index.drain(segment, undo=True)
            self.index.clear()
            self.index.check()
            assert [self.index.tenant_stats(tenant).blocks for tenant in TENANTS] == [0, 0, 0]


TestTenancy = Tenancy.TestCase
TestTenancy.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
