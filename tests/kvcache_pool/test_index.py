"""The index: every law after every step of random histories, and the cases with names."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache_pool.api import Grant, Lease, LeaseLost, PinKind, PoolFull
from kvcache_pool.eviction import EVICTIONS
from kvcache_pool.index import Index
from kvcache_pool.leases import QUARANTINE_S
from kvcache_pool.stock import SEGMENT_SILENT_S
from protocol.ids import Incarnation, SegmentId
from tests.kvcache_pool.builders import a_place, an_ask, an_index, cache, copy, names


def test_a_touched_prefix_outlives_what_was_committed_after_it() -> None:
    index = an_index(a=4)
    cache(index, 1, 2)
    for number in (3, 4):
        lease = index.acquire(an_ask([], unnamed=1), 0.0)
        index.commit(lease.lease, [0], names(number), 0.0)
        index.release(lease.lease)
        index.touch(names(*range(1, number)))
    index.touch(names(77))  # nobody has it
    for room, reach in ((1, 3), (2, 2), (3, 1)):
        lease = index.acquire(an_ask([], unnamed=room), 0.0)
        assert index.find(names(1, 2, 3, 4)).reach == reach
        index.release(lease.lease)
    index.check()


def test_a_lease_under_a_name_that_is_taken_is_refused_and_changes_nothing() -> None:
    index = an_index(a=4)
    ask = an_ask(names(1))
    index.acquire(ask, 0.0)
    before = index.stats()
    with pytest.raises(ValueError, match="already"):
        index.acquire(ask, 0.0)
    assert index.stats() == before
    index.check()


def test_a_committed_prefix_is_found_and_leased() -> None:
    index = an_index(kv=8)
    first = cache(index, 1, 2, 3)
    found = index.find(names(1, 2, 3, 4))
    assert (found.reach, found.held) == (3, {"kv": 3})
    lease = index.acquire(an_ask(names(1, 2, 3, 4), unnamed=1), 0.0)
    assert lease.sources == first.targets
    assert len(lease.targets) == 2
    assert [place.segment for place in lease.places] == ["kv"]
    stats = index.stats()
    assert (stats.free, stats.cached, stats.leased, stats.reserved, stats.leases) == (3, 3, 3, 2, 1)
    index.check()


def test_a_chain_is_found_only_up_to_its_first_gap_and_reserved_blocks_not_at_all() -> None:
    index = an_index(kv=8)
    cache(index, 1)
    index.acquire(an_ask(names(1, 2)), 0.0)
    cache(index, 1, 2, 3)
    assert index.find(names(1, 2, 3)).reach == 3
    assert index.find(names(2, 3)).reach == 2
    assert index.find(names(7, 1)).reach == 0
    assert index.find([]).reach == 0
    index.discard([index.acquire(an_ask(names(1, 2)), 0.0).sources[1]])
    assert index.find(names(1, 2, 3)).reach == 1
    index.check()


def test_reach_is_over_the_union_and_held_of_each_segment_alone() -> None:
    index = an_index(a=8, b=8)
    cache(index, 1, 2, near="a")
    lease = index.acquire(an_ask(names(1, 2, 3), near="b"), 0.0)
    index.commit(lease.lease, [0], names(3), 0.0)
    index.release(lease.lease)
    cache_again = index.acquire(an_ask(names(1), reuse=0, near="b"), 0.0)
    index.commit(cache_again.lease, [0], names(1), 0.0)
    found = index.find(names(1, 2, 3))
    assert (found.reach, found.held) == (3, {"a": 2, "b": 1})
    near_b = index.acquire(an_ask(names(1, 2, 3), near="b"), 0.0)
    assert [grant.segment for grant in near_b.sources] == ["b", "a", "b"]
    assert {place.segment for place in near_b.places} == {"a", "b"}
    index.check()


def test_reuse_bounds_what_is_taken_from_the_cache() -> None:
    index = an_index(kv=8)
    cache(index, 1, 2, 3)
    lease = index.acquire(an_ask(names(1, 2, 3), reuse=2), 0.0)
    assert (len(lease.sources), len(lease.targets)) == (2, 1)


def test_of_two_writers_of_one_block_the_first_commit_gets_the_name() -> None:
    index = an_index(kv=4)
    one, two = (index.acquire(an_ask(names(1, 2)), 0.0) for _ in range(2))
    index.commit(two.lease, [0, 1], names(1, 2), 0.0)
    index.commit(one.lease, [0, 1], names(1, 2), 0.0)
    index.commit(two.lease, [0, 1], names(1, 2), 0.0)
    index.check()
    assert (index.stats().cached, index.stats().reserved) == (2, 2)
    index.release(one.lease)
    assert (index.stats().cached, index.stats().free) == (2, 2)
    assert index.acquire(an_ask(names(1, 2)), 0.0).sources == two.targets
    index.check()


def test_full_changes_nothing() -> None:
    index = an_index(a=3, b=2)
    cache(index, 1, 2, near="a")
    held = index.acquire(an_ask(names(3), near="b"), 0.0)
    before = (index.stats(), index.find(names(1, 2)), index.find(names(3)))
    with pytest.raises(PoolFull):
        index.acquire(an_ask(names(1, 2), unnamed=3), 0.0)  # 2 leased by itself, 2 free, 1 held by another
    assert (index.stats(), index.find(names(1, 2)), index.find(names(3))) == before
    index.check()
    index.release(held.lease)
    assert len(index.acquire(an_ask(names(1, 2), unnamed=3), 0.0).targets) == 3
    index.check()


def test_targets_go_near_then_where_most_is_free_then_anywhere() -> None:
    index = an_index(a=2, b=5, c=3)

    def segments(unnamed: int, near: str | None) -> list[str]:
        lease = index.acquire(an_ask([], unnamed=unnamed, near=near), 0.0)
        index.release(lease.lease)
        return [grant.segment for grant in lease.targets]

    assert segments(2, "a") == ["a"] * 2
    assert segments(2, None) == ["b"] * 2
    assert segments(3, "a") == ["b"] * 3
    assert segments(7, "c") == ["c"] * 3 + ["b"] * 4
    assert segments(2, "unknown") == ["b"] * 2
    with pytest.raises(PoolFull):
        segments(11, None)


def test_eviction_takes_the_oldest_and_of_a_prefix_its_end() -> None:
    index = an_index(kv=4)
    cache(index, 1, 2, now=0.0)
    cache(index, 8, 9, now=1.0)
    cache(index, 1, now=2.0)
    cache(index, 5, now=3.0)
    assert index.find(names(1, 2)).reach == 1
    assert index.find(names(8, 9)).reach == 2
    cache(index, 6, now=4.0)
    assert index.find(names(8, 9)).reach == 1
    assert index.stats().evicted == 2
    index.check()


def test_a_lookup_refreshes_nothing() -> None:
    index = an_index(kv=2)
    cache(index, 1)
    cache(index, 2)
    index.find(names(1))
    cache(index, 3)
    assert index.find(names(1)).reach == 0


def test_a_lease_protects_from_eviction_and_clear_and_two_share_a_block() -> None:
    index = an_index(kv=2)
    cache(index, 1)
    leases = [index.acquire(an_ask(names(1)), 0.0) for _ in range(2)]
    index.release(leases[0].lease)
    with pytest.raises(PoolFull):
        index.acquire(an_ask([], unnamed=2), 0.0)
    assert index.clear() == 0
    index.release(leases[1].lease)
    index.release(leases[1].lease)
    assert index.clear() == 1
    assert index.stats().free == 2
    index.check()


def test_each_use_of_a_slot_has_a_greater_generation() -> None:
    index, seen = an_index(kv=2), 0
    for number in range(20):
        for grant in cache(index, number).targets:
            assert grant.generation > seen
            seen = grant.generation


def test_an_expired_lease_is_lost_and_its_reserved_slots_wait_out_their_writer() -> None:
    index = an_index(kv=3)
    lease = index.acquire(an_ask(names(1, 2), unnamed=1, lease_s=10.0), 0.0)
    index.commit(lease.lease, [0], names(1), 5.0)
    assert index.expire(9.9) == []
    assert [claim.owner for claim in index.expire(10.0)] == ["request"]
    index.check()
    stats = index.stats()
    assert (stats.cached, stats.leased, stats.reserved, stats.leases) == (1, 0, 2, 0)
    with pytest.raises(LeaseLost):
        index.commit(lease.lease, [1], names(2), 10.0)
    with pytest.raises(LeaseLost):
        index.renew(lease.lease, 30.0, 10.0)
    with pytest.raises(PoolFull):
        index.acquire(an_ask([], unnamed=2), 10.0 + QUARANTINE_S - 0.1)
    assert len(index.acquire(an_ask([], unnamed=2), 10.0 + QUARANTINE_S).targets) == 2
    index.check()


def test_the_owner_of_an_expired_lease_may_free_its_slots_at_once() -> None:
    index = an_index(kv=3)
    lease = index.acquire(an_ask([], unnamed=3, lease_s=1.0), 0.0)
    index.expire(1.0)
    index.release(lease.lease)
    assert index.stats().free == 3
    index.check()


def test_renewing_moves_the_end_and_never_back() -> None:
    index = an_index()
    lease = index.acquire(an_ask([], unnamed=1, lease_s=10.0), 0.0)
    index.renew(lease.lease, 10.0, 8.0)
    index.renew(lease.lease, 1.0, 8.0)
    assert index.expire(17.9) == []
    assert len(index.expire(18.0)) == 1
    with pytest.raises(LeaseLost):
        index.renew(lease.lease, 10.0, 18.0)


def test_a_discarded_block_is_never_offered_again_and_freed_with_its_last_lease() -> None:
    index = an_index(kv=4)
    cache(index, 1, 2)
    lease = index.acquire(an_ask(names(1, 2)), 0.0)
    assert index.discard([lease.sources[1], Grant(SegmentId("kv"), 0, 7), Grant(SegmentId("no"), 0, 7)]) == 1
    assert index.find(names(1, 2)).reach == 1
    index.check()
    index.release(lease.lease)
    assert index.stats().free == 3
    writer = index.acquire(an_ask(names(3)), 0.0)
    index.discard(writer.targets)
    index.commit(writer.lease, [0], names(3), 0.0)
    assert index.find(names(3)).reach == 0
    index.check()


def test_commit_refuses_targets_that_were_never_granted() -> None:
    index = an_index()
    lease = index.acquire(an_ask(names(1)), 0.0)
    for slots, blocks in (([1], names(1)), ([-1], names(1)), ([0], names(1, 2))):
        with pytest.raises(ValueError, match="1 targets"):
            index.commit(lease.lease, slots, blocks, 0.0)
    with pytest.raises(LeaseLost):
        index.commit(Lease("never", [], [], []).lease, [], [], 0.0)


def test_a_segment_that_leaves_takes_its_blocks_and_leases_keep_the_rest() -> None:
    index = an_index(a=2, b=2)
    cache(index, 1, near="a")
    lease = index.acquire(an_ask(names(1, 2), unnamed=1, near="b"), 0.0)
    assert not index.leave(SegmentId("a"), Incarnation("another"))
    assert index.leave(SegmentId("a"), Incarnation("a"))
    assert not index.leave(SegmentId("a"), Incarnation("a"))
    index.check()
    assert index.find(names(1)).reach == 0
    index.commit(lease.lease, [0], names(2), 0.0)
    index.release(lease.lease)
    assert (index.stats().total, index.stats().cached) == (2, 1)
    index.check()


def test_a_segment_in_a_new_incarnation_begins_empty_and_above_old_generations() -> None:
    index = an_index(kv=2)
    old = index.acquire(an_ask(names(1), unnamed=1, lease_s=1.0), 0.0)
    assert not index.announce(a_place("kv", 2), 0, 0.5)
    assert index.announce(a_place("kv", 2, "b"), 0, 0.6)
    new = index.acquire(an_ask(names(1), unnamed=1), 0.7)
    assert min(g.generation for g in new.targets) > max(g.generation for g in old.targets) + 10**6
    index.commit(old.lease, [0], names(1), 0.8)  # the write will fail; to publish what is gone does nothing
    assert index.find(names(1)).reach == 0
    index.expire(1.0)
    index.expire(1.0 + QUARANTINE_S)
    index.check()


def test_a_new_directory_begins_above_what_a_segment_has_seen() -> None:
    seen = 5 << 40
    index = Index()
    index.announce(a_place("kv", 2), seen, 0.0)
    assert index.acquire(an_ask([], unnamed=1), 0.0).targets[0].generation > seen + 10**6


def test_silent_segments_are_dropped_and_may_come_back() -> None:
    index = an_index(a=2, b=2)
    cache(index, 1, near="a")
    index.announce(a_place("b", 2), 0, 2.0)
    assert index.silent(SEGMENT_SILENT_S) == []
    assert index.silent(SEGMENT_SILENT_S + 0.1) == ["a"]
    assert index.stats().total == 2
    assert index.announce(a_place("a", 2), 9, 4.0)
    assert (index.stats().total, index.find(names(1)).reach) == (4, 0)
    index.check()


def test_a_prefix_that_is_read_elsewhere_is_copied_near_and_found_there() -> None:
    index = an_index(a=8, b=8)
    source = cache(index, 1, 2, 3, near="a")
    lease = index.acquire(an_ask(names(1, 2, 3, 4), unnamed=1, near="b", copies=3), 0.0)
    assert lease.sources == source.targets
    assert [(one.source, one.target.segment) for one in lease.copies] == [(0, "b"), (1, "b"), (2, "b")]
    assert {place.segment for place in lease.places} == {"a", "b"}
    assert (index.stats().reserved, index.stats().copies) == (5, 3)
    index.commit(lease.lease, [0, 2, 3, 4], names(4, 1, 2, 3), 0.0)
    index.release(lease.lease)
    index.check()
    assert index.find(names(1, 2, 3, 4)).held == {"a": 3, "b": 4}
    assert [index.replicas(name) for name in names(1, 4, 7)] == [2, 1, 0]
    assert (index.stats().cached, index.stats().copies, index.stats().free) == (7, 3, 9)
    again = index.acquire(an_ask(names(1, 2, 3, 4), near="b", copies=3), 0.0)
    assert {grant.segment for grant in again.sources} == {"b"}
    assert again.copies == []


def test_only_what_is_lacking_is_copied_and_as_much_as_was_asked_for() -> None:
    index = an_index(a=8, b=8)
    cache(index, 1, 2, 3, 4, near="a")
    copy(index, 1, near="b")
    for copies, sources in ((2, [1, 2]), (9, [1, 2, 3]), (0, [])):
        lease = index.acquire(an_ask(names(1, 2, 3, 4), near="b", copies=copies), 0.0)
        assert [one.source for one in lease.copies] == sources
        index.release(lease.lease)
    nowhere = index.acquire(an_ask(names(1, 2, 3, 4), near="gone", copies=9), 0.0)
    assert index.acquire(an_ask(names(1, 2, 3, 4), copies=9), 0.0).copies == nowhere.copies == []
    index.check()


def test_copies_stop_at_the_budget_and_go_on_when_the_original_is_gone() -> None:
    index = an_index(a=8, b=8, copies_share=0.25)
    first = cache(index, 1, 2, 3, near="a")
    assert len(copy(index, 1, 2, 3, near="b").copies) == 2
    assert len(copy(index, 1, 2, 3, near="b").copies) == 0
    index.discard(first.targets[:1])
    assert (index.replicas(names(1)[0]), index.stats().copies) == (1, 1)
    assert [one.source for one in copy(index, 1, 2, 3, near="b").copies] == [2]
    index.check()
    assert index.leave(SegmentId("a"), Incarnation("a"))
    assert (index.stats().copies, index.find(names(1, 2, 3)).held) == (0, {"b": 3})
    index.check()


def test_copies_evict_what_is_idle_and_nothing_else_and_are_never_a_reason_to_refuse() -> None:
    index = an_index(a=4, b=4, copies_share=1.0)
    cache(index, 1, 2, 3, near="a")
    cache(index, 7, near="b")
    held = index.acquire(an_ask([], unnamed=2, near="b"), 0.0)
    lease = index.acquire(an_ask(names(1, 2, 3), near="b", copies=3), 0.0)
    assert [one.source for one in lease.copies] == [0, 1]
    assert (index.find(names(7)).reach, index.stats().evicted) == (0, 1)
    full = index.acquire(an_ask(names(1, 2, 3), near="b", copies=3), 0.0)
    assert (len(full.sources), full.copies) == (3, [])
    index.check()
    for ended in (held, lease, full):
        index.release(ended.lease)
    index.check()
    assert (index.stats().copies, index.stats().free) == (0, 5)


def test_of_two_copies_of_one_block_to_one_segment_the_first_commit_gets_the_name() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, near="a")
    one, two = (index.acquire(an_ask(names(1), near="b", copies=1), 0.0) for _ in range(2))
    assert index.stats().copies == 2
    index.commit(two.lease, [0], names(1), 0.0)
    index.commit(one.lease, [0], names(1), 0.0)
    index.check()
    for lease in (one, two):
        index.release(lease.lease)
    assert index.acquire(an_ask(names(1), near="b"), 0.0).sources == [two.copies[0].target]
    assert (index.stats().copies, index.stats().free) == (1, 6)
    index.check()


def test_a_copy_that_outlived_its_original_before_it_was_committed_is_none() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, near="a")
    lease = index.acquire(an_ask(names(1), near="b", copies=1), 0.0)
    index.discard(lease.sources)
    index.commit(lease.lease, [0], names(1), 0.0)
    assert (index.replicas(names(1)[0]), index.stats().copies) == (1, 0)
    index.check()


def test_an_expired_lease_keeps_its_uncommitted_copies_until_their_writer_is_done() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, near="a")
    lease = index.acquire(an_ask(names(1, 2), near="b", copies=2, lease_s=1.0), 0.0)
    index.commit(lease.lease, [0], names(1), 0.0)
    index.expire(1.0)
    index.check()
    assert (index.stats().reserved, index.stats().copies) == (1, 2)
    index.expire(1.0 + QUARANTINE_S)
    assert (index.stats().reserved, index.stats().copies) == (0, 1)
    index.check()


def test_a_prefix_is_evicted_from_its_end_also_where_parts_of_it_are_copies() -> None:
    index = an_index(a=8, b=4, copies_share=1.0)
    cache(index, 1, 2, 3, near="a")
    copy(index, 1, 2, 3, near="b", copies=2)
    lease = index.acquire(an_ask(names(1, 2, 3, 4), near="b", copies=9), 0.0)
    index.commit(lease.lease, [0, 1], names(4, 3), 0.0)
    index.release(lease.lease)
    for left in (3, 2, 1):
        index.release(index.acquire(an_ask([], unnamed=4 - left, near="b"), 0.0).lease)
        assert index.find(names(1, 2, 3, 4)).held["b"] == left
    index.check()


def test_what_was_copied_elsewhere_goes_first_where_it_was_and_end_first() -> None:
    index = an_index(a=4, b=4, copies_share=1.0)
    cache(index, 1, 2, near="a")
    cache(index, 7, 8, near="a")
    copy(index, 7, 8, near="b")
    for room, left in ((1, 1), (2, 0)):
        index.release(index.acquire(an_ask([], unnamed=room, near="a"), 0.0).lease)
        assert index.find(names(7, 8)).held == {"a": left, "b": 2} if left else {"b": 2}
    assert index.find(names(1, 2)).held == {"a": 2}
    assert index.stats().copies == 0
    index.check()


def test_what_could_not_be_copied_or_was_used_since_does_not_go_first() -> None:
    index = an_index(a=4, b=4, copies_share=1.0)
    cache(index, 1, 2, near="a")
    cache(index, 7, 8, near="a")
    index.release(index.acquire(an_ask(names(7, 8), near="b", copies=2), 0.0).lease)
    copy(index, 1, 2, near="b")
    cache(index, 1, 2, near="a")
    index.release(index.acquire(an_ask([], unnamed=2, near="a"), 0.0).lease)
    assert index.find(names(1, 2)).held == {"a": 2, "b": 2}
    assert index.find(names(7, 8)).reach == 0
    index.check()


def evict(index: Index, count: int, near: str | None = None) -> None:
    """As much as a prompt needs that comes and goes."""
    index.release(index.acquire(an_ask([], unnamed=count, near=near), 0.0).lease)


def test_soft_pins_go_when_nothing_else_is_left_and_end_with_their_time() -> None:
    index = an_index(kv=4)
    cache(index, 1, 2)
    cache(index, 3, 4)
    assert index.pin(names(1, 2), PinKind.SOFT, 10.0) == 2
    assert index.stats().pinned == 2
    evict(index, 2)
    assert (index.find(names(1, 2)).reach, index.find(names(3)).reach) == (2, 0)
    index.check()
    evict(index, 3)
    assert (index.find(names(1, 2)).reach, index.stats().pinned) == (1, 1)
    cache(index, 5, 6)
    index.expire(10.0)
    assert index.stats().pinned == 0
    index.check()
    cache(index, 5, 6)
    evict(index, 2)
    assert (index.find(names(1)).reach, index.find(names(5, 6)).reach) == (0, 2)


def test_pinned_prefixes_keep_their_fronts_longest_also_when_their_pins_are_over() -> None:
    for end_pins in (
        lambda index: index.unpin(names(1, 2, 3)),
        lambda index: index.expire(10.0),
        lambda index: None,
    ):
        index = an_index(kv=4)
        cache(index, 1, 2, 3)
        index.pin(names(1, 2, 3), PinKind.SOFT, 10.0)
        end_pins(index)
        for left in (2, 1):
            evict(index, 4 - left)
            assert index.find(names(1, 2, 3)).reach == left
        index.check()


def test_hard_pins_are_never_evicted_and_a_pool_cannot_be_pinned_shut() -> None:
    index = an_index(kv=4)
    cache(index, 1, 2, 3)
    assert index.pin(names(1, 2, 3), PinKind.HARD, 10.0) == 2  # half of the four
    assert index.pin(names(9, 1), PinKind.HARD, 10.0) == 0
    with pytest.raises(PoolFull):
        index.acquire(an_ask([], unnamed=3), 0.0)
    with pytest.raises(PoolFull):
        index.acquire(an_ask(names(1, 2), unnamed=3), 0.0)  # two of its own, which count as taken in any case
    evict(index, 2)
    assert index.find(names(1, 2, 3)).reach == 2
    index.check()
    assert index.unpin(names(1, 2, 3)) == 2
    evict(index, 4)
    assert index.find(names(1)).reach == 0
    index.check()


def test_a_pin_of_a_leased_block_counts_when_the_lease_ends() -> None:
    index = an_index(kv=4)
    cache(index, 1, 2)
    lease = index.acquire(an_ask(names(1, 2)), 0.0)
    assert index.pin(names(1), PinKind.HARD, 10.0) == 1
    index.check()
    index.release(lease.lease)
    index.check()
    evict(index, 3)
    assert index.find(names(1)).reach == 1
    index.expire(10.0)
    evict(index, 4)
    assert index.find(names(1)).reach == 0


def test_one_replica_is_pinned_and_where_hard_pins_have_room() -> None:
    index = an_index(a=2, b=4, hard_pins_share=0.25)  # none in a, one in b
    cache(index, 1, 2, near="a")
    assert index.pin(names(1), PinKind.HARD, 10.0) == 0
    assert index.pin(names(1), PinKind.SOFT, 10.0) == 1
    copy(index, 1, 2, near="b")
    assert index.pin(names(1), PinKind.HARD, 10.0) == 1
    assert [one.pinned for one in index.segment_stats()] == [0, 1]
    assert index.pin(names(1, 2), PinKind.HARD, 20.0) == 1
    index.check()
    assert index.leave(SegmentId("b"), Incarnation("a"))
    assert index.stats().pinned == 0
    index.check()


def test_remove_forgets_a_block_everywhere_with_its_pin_but_for_leases() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, 3, near="a")
    copy(index, 1, near="b")
    index.pin(names(1, 2, 3), PinKind.HARD, 10.0)
    lease = index.acquire(an_ask(names(1, 2), near="a"), 0.0)
    assert index.remove(names(1, 2, 3, 4)) == 1
    assert (index.find(names(1, 2)).held, index.find(names(3)).reach) == ({"a": 2}, 0)
    assert (index.stats().pinned, index.stats().copies) == (0, 0)
    index.check()
    index.release(lease.lease)
    assert index.remove(names(1, 2, 1)) == 2
    assert index.stats().free == 8
    index.check()


def test_clear_discard_and_a_new_life_end_pins() -> None:
    index = an_index(kv=8)
    first = cache(index, 1, 2, 3)
    assert index.pin(names(1, 2, 3), PinKind.HARD, 10.0) == 3
    index.discard(first.targets[2:])
    assert index.stats().pinned == 2
    assert index.clear() == 2
    assert (index.stats().pinned, index.stats().free) == (0, 8)
    cache(index, 1)
    index.pin(names(1), PinKind.HARD, 10.0)
    index.announce(a_place("kv", 8, "b"), 0, 0.0)
    assert index.stats().pinned == 0
    index.check()


def test_above_its_watermark_a_segment_is_trimmed_and_below_it_not() -> None:
    index = an_index(a=10, b=10, watermark=0.8, watermark_step=0.3)
    cache(index, *range(8), near="a")
    assert index.trim() == 0
    cache(index, *range(9), near="a")
    assert index.trim() == 4  # down to half
    assert (index.find(names(*range(9))).reach, index.stats().evicted) == (5, 4)
    index.check()
    assert index.trim() == 0


def test_trimming_spares_leases_and_pins_and_is_off_unless_asked_for() -> None:
    index = an_index(kv=10, watermark=0.5, watermark_step=0.5)
    cache(index, *range(8))
    index.pin(names(0, 1), PinKind.SOFT, 9.0)
    index.pin(names(2), PinKind.HARD, 9.0)
    lease = index.acquire(an_ask(names(0, 1, 2, 3)), 0.0)
    assert index.trim() == 4
    index.release(lease.lease)
    assert index.trim() == 0  # four of ten are no more than half
    index.check()
    always_full = an_index(kv=4)
    cache(always_full, 1, 2, 3, 4)
    assert always_full.trim() == 0


def test_segments_are_counted_each() -> None:
    index = an_index(a=4, b=3)
    cache(index, 1, 2, near="a")
    copy(index, 1, near="b")
    index.pin(names(1), PinKind.SOFT, 10.0)
    held = index.acquire(an_ask(names(1, 2), unnamed=1, near="a"), 0.0)
    a, b = index.segment_stats()
    assert (a.segment, a.incarnation, a.host, a.total) == ("a", "a", "here", 4)
    assert (a.free, a.cached, a.leased, a.pinned, a.copies) == (1, 2, 2, 1, 0)
    assert (b.total, b.free, b.cached, b.leased, b.pinned, b.copies) == (3, 2, 1, 0, 0, 1)
    index.release(held.lease)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "length_aware"])
def test_ends_go_before_fronts_across_turns_of_a_chat(eviction: str) -> None:
    index = an_index(kv=8, eviction=eviction)
    cache(index, 1, 2, 3)
    cache(index, 1, 2, 3, 4, 5)
    lease = index.acquire(an_ask(names(6), reuse=0), 0.0)
    index.commit(lease.lease, [0], names(6), 0.0)
    index.release(lease.lease, before=5)
    index.touch(names(1, 2, 3, 4, 5))
    for left in (7, 6, 5, 4, 3, 2, 1):
        evict(index, 8 - left)
        index.check()
        stats = index.stats()
        assert index.find(names(1, 2, 3, 4, 5, 6)).reach == stats.cached <= left


class History(RuleBasedStateMachine):
    """Any order of any calls, on a small pool, with a model of what must be protected."""

    chains = st.lists(st.integers(0, 5), max_size=5, unique=True)

    @initialize(eviction=st.sampled_from(sorted(EVICTIONS)))
    def begin(self, eviction: str) -> None:
        self.index = an_index(a=4, b=3, eviction=eviction, watermark=0.6, watermark_step=0.3)
        self.hard: dict[int, float] = {}  # numbers of blocks that are pinned hard, and until when
        self.incarnations = {"a": "a", "b": "a"}
        self.now = 0.0
        self.leases: list[tuple[Lease, float]] = []
        self.lives = 0

    def living(self) -> list[Lease]:
        return [lease for lease, end in self.leases if end > self.now]

    @rule(
        chain=chains,
        reuse=st.integers(0, 5),
        unnamed=st.integers(0, 3),
        near=st.sampled_from([None, "a", "b"]),
        lease_s=st.sampled_from([1.0, 10.0, 50.0]),
        copies=st.integers(0, 5),
    )
    def acquire(
        self, chain: list[int], reuse: int, unnamed: int, near: str | None, lease_s: float, copies: int
    ) -> None:
        self.index.expire(self.now)
        found, before = self.index.find(names(*chain)), self.index.stats()
        ask = an_ask(names(*chain), reuse=reuse, unnamed=unnamed, near=near, lease_s=lease_s, copies=copies)
        reused = min(found.reach, reuse)
        # What is needed besides copies, and what could be had for it if the whole prefix were idle, or all leased.
        count, room = len(chain) - reused + unnamed, before.free + before.cached - before.leased
        try:
            lease = self.index.acquire(ask, self.now)
        except PoolFull:
            assert self.index.stats() == before
            assert count > room - reused - len(self.hard)
            return
        assert count <= room
        assert len(lease.sources) == reused
        assert len(lease.targets) == count
        self.copied(lease, near, copies)
        granted = {(grant.segment, grant.slot, grant.generation) for grant in granted_of(lease)}
        for other in self.living():
            taken = {(g.segment, g.slot, g.generation) for g in [*other.sources, *granted_of(other)]}
            assert granted.isdisjoint(taken)
        self.leases.append((lease, self.now + lease_s))

    def copied(self, lease: Lease, near: str | None, copies: int) -> None:
        """Copies are near, of what is not there, and the first of those."""
        elsewhere = [source for source, grant in enumerate(lease.sources) if grant.segment != near]
        assert [copy.source for copy in lease.copies] == elsewhere[: len(lease.copies)]
        assert len(lease.copies) <= copies
        assert all(copy.target.segment == near for copy in lease.copies)

    @rule(data=st.data(), chain=chains)
    def commit(self, data: st.DataObject, chain: list[int]) -> None:
        if self.leases:
            lease, end = data.draw(st.sampled_from(self.leases))
            count = min(len(chain), len(granted_of(lease)))
            blocks = names(*chain[:count])
            if end > self.now:
                self.index.commit(lease.lease, list(range(count)), blocks, self.now)
            else:
                with pytest.raises(LeaseLost):
                    self.index.commit(lease.lease, list(range(count)), blocks, self.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            chosen = data.draw(st.sampled_from(self.leases))
            self.leases.remove(chosen)
            self.index.release(chosen[0].lease)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        if self.leases:
            lease, _ = data.draw(st.sampled_from(self.leases))
            self.index.discard([*lease.sources, *granted_of(lease)][:2])
            self.forgotten()

    def forgotten(self) -> None:
        """Pins end with what they pinned; that nothing else ends them is a law."""
        self.hard = {number: end for number, end in self.hard.items() if self.index.find(names(number)).reach}

    @rule(chain=chains, kind=st.sampled_from(PinKind), for_s=st.sampled_from([1.0, 30.0, 90.0]))
    def pin(self, chain: list[int], kind: PinKind, for_s: float) -> None:
        self.index.expire(self.now)
        pinned = self.index.pin(names(*chain), kind, self.now + for_s)
        assert pinned <= self.index.find(names(*chain)).reach
        if kind is PinKind.SOFT:
            assert pinned == self.index.find(names(*chain)).reach
        for number in chain[:pinned]:
            self.hard.pop(number, None)
            if kind is PinKind.HARD:
                self.hard[number] = self.now + for_s

    @rule(chain=chains)
    def unpin(self, chain: list[int]) -> None:
        self.index.unpin(names(*chain))
        self.unpinned(chain)

    @rule(chain=chains)
    def remove(self, chain: list[int]) -> None:
        before = self.index.stats()
        self.index.remove(names(*chain))
        self.unpinned(chain)
        assert self.index.stats().leased == before.leased
        held = {grant for lease in self.living() for grant in lease.sources}
        left = [grant for name, _, grant in self.index.named() if name in names(*chain)]
        assert all(grant in held or grant in self.granted() for grant in left)

    def unpinned(self, chain: list[int]) -> None:
        for number in chain:
            self.hard.pop(number, None)

    def granted(self) -> set[Grant]:
        return {grant for lease, _ in self.leases for grant in granted_of(lease)}

    @rule()
    def trim(self) -> None:
        before = self.index.stats()
        gone = self.index.trim()
        after = self.index.stats()
        assert after.free - before.free == after.evicted - before.evicted == gone
        assert (after.leased, after.reserved, after.pinned) == (before.leased, before.reserved, before.pinned)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.forgotten()
        assert self.index.stats().cached == self.index.stats().leased

    @rule(seconds=st.sampled_from([0.5, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)

    @rule(segment=st.sampled_from(["a", "b"]), leave=st.booleans())
    def restart(self, segment: str, leave: bool) -> None:
        if leave:
            self.index.leave(SegmentId(segment), Incarnation(self.incarnations[segment]))
        else:
            self.lives += 1
            self.incarnations[segment] = f"life {self.lives}"
            self.index.announce(a_place(segment, 3, self.incarnations[segment]), self.lives, self.now)
        self.forgotten()

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            stats = self.index.stats()
            assert stats.free + stats.cached + stats.reserved == stats.total
            self.hard = {number: end for number, end in self.hard.items() if end > self.now}
            assert all(self.index.find(names(number)).reach for number in self.hard), "a hard pin was evicted"
            assert len(self.hard) <= 2 + 1
            assert stats.copies <= 2 + 1  # half of a's four slots, and of the three of b

    def teardown(self) -> None:
        if hasattr(self, "index"):
            for lease, _ in self.leases:
                self.index.release(lease.lease)
            self.index.expire(self.now + 100.0)
            self.index.expire(self.now + 200.0)
            self.index.clear()
            self.index.check()
            assert self.index.stats().free == self.index.stats().total


def granted_of(lease: Lease) -> list[Grant]:
    """What a commit's slots count."""
    return [*lease.targets, *(copy.target for copy in lease.copies)]


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
