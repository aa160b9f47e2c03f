"""The orders of eviction by themselves, and what is idle with its pins."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_pool.api import PinKind
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.eviction import EVICTIONS, LeastRecent, LeastUsed, LengthAware, Order, S3Fifo
from kvcache_pool.idle import Idle
from kvcache_pool.pins import Pins
from protocol.ids import BlockHash

orders = pytest.mark.parametrize("kind", EVICTIONS.values(), ids=EVICTIONS)


def use(order: Order, *slots: int) -> None:
    """As a prompt of these blocks does: from last to first."""
    for depth, slot in reversed(list(enumerate(slots))):
        order.touch(slot, name_of(slot), depth)


def name_of(slot: int) -> BlockHash:
    return BlockHash(b"%d" % slot)


def all_of(order: Order) -> list[int]:
    return [order.take() for _ in range(len(order))]


def test_the_least_recently_touched_goes_first() -> None:
    order = LeastRecent(3)
    for slot in (0, 1, 2, 0, 1):
        order.touch(slot)
    order.drop(1)
    order.drop(1)
    assert list(order) == [2, 0]
    assert 1 not in order
    assert (order.take(), order.take(), len(order)) == (2, 0, 0)


@orders
def test_of_a_prompt_the_end_goes_before_the_front(kind: type[Order]) -> None:
    order = kind(8)
    use(order, 0, 1, 2, 3)
    assert all_of(order) == [3, 2, 1, 0]
    with pytest.raises(KeyError):
        order.take()


@orders
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["touch", "drop", "forget", "take"]), st.integers(0, 6), st.integers(0, 9))
    )
)
def test_an_order_holds_what_was_touched_and_not_taken_away(
    kind: type[Order], steps: Iterable[tuple[str, int, int]]
) -> None:
    order, held = kind(7), set[int]()
    for step, slot, depth in steps:
        if step == "touch":
            order.touch(slot, name_of(slot), depth)
            held.add(slot)
        elif step == "take" and held:
            held.remove(order.take())
        elif step in ("drop", "forget"):
            getattr(order, step)(slot)
            held.discard(slot)
        assert sorted(order) == sorted(held)
        assert [slot in order for slot in range(7)] == [slot in held for slot in range(7)]
        assert len(order) == len(held)


def test_the_least_used_goes_first_and_uses_are_counted_through_leases_until_the_block_is_gone() -> None:
    order = LeastUsed(4)
    use(order, 0, 1)
    use(order, 0)
    order.drop(0)
    use(order, 2)
    use(order, 2)
    use(order, 0)
    assert list(order) == [1, 2, 0]
    order.forget(0)
    use(order, 0)
    assert all_of(order) == [1, 0, 2]


def test_of_old_blocks_the_deep_ones_go_first_and_age_counts_too() -> None:
    order = LengthAware(256)  # each block before it makes one look older by one touch
    use(order, *range(10))
    use(order, *range(10, 14))
    first = [order.take() for _ in range(6)]
    assert first[:4] == [9, 8, 7, 6]
    assert set(all_of(order)) == {*range(14)} - set(first)
    use(order, *range(100))
    for slot in range(100, 103):
        order.touch(slot, name_of(slot), 0)
    order.touch(99, name_of(99), None)  # as deep as it was
    assert order.take() == 98
    for _ in range(1000):
        order.touch(50, name_of(50), 0)
    assert order.take() == 97


def test_a_scan_of_new_blocks_passes_by_those_in_use() -> None:
    order = S3Fifo(10)
    use(order, 0, 1)
    for _ in range(2):
        use(order, 0, 1)
    for slot in range(2, 10):
        use(order, slot)
    assert [order.take() for _ in range(7)] == [2, 3, 4, 5, 6, 7, 8]
    assert sorted(order) == [0, 1, 9]


def test_who_comes_back_soon_after_going_has_proved_itself() -> None:
    order = S3Fifo(10)
    use(order, 0)
    use(order, 1)
    assert order.take() == 0
    use(order, 0)
    for slot in (2, 3, 4):
        use(order, slot)
    assert [order.take() for _ in range(3)] == [1, 2, 3]


def test_a_leased_block_keeps_its_place_and_is_never_taken() -> None:
    order = S3Fifo(10)
    for slot in (0, 1, 2, 3):
        use(order, slot)
    order.drop(0)
    assert [order.take(), order.take()] == [1, 2]
    use(order, 0)
    use(order, 4)
    assert [order.take(), order.take()] == [3, 0]


def test_the_setting_names_the_orders() -> None:
    assert KVCacheConfig.eviction == "lru"
    assert set(KVCacheConfig.__annotations__["eviction"].__args__) == set(EVICTIONS)


def an_idle(*slots: int, hard_max: int = 9) -> Idle:
    idle = Idle(LeastRecent(9), hard_max)
    for slot in slots:
        idle.touch(slot, name_of(slot))
    return idle


def test_what_is_demoted_is_the_next_to_go_until_it_is_used() -> None:
    idle = an_idle(0, 1, 2)
    idle.demote(2)
    idle.demote(1)
    idle.demote(7)
    assert list(idle) == [1, 2, 0]
    idle.touch(1, name_of(1))
    idle.check()
    assert [idle.take() for _ in range(3)] == [2, 0, 1]
    with pytest.raises(KeyError):
        idle.take()


def test_soft_pins_go_last_and_hard_ones_never() -> None:
    idle = an_idle(0, 1, 2, 3)
    for slot, kind in ((0, PinKind.HARD), (1, PinKind.SOFT), (2, PinKind.SOFT)):
        assert idle.pin(slot, name_of(slot), kind, 9.0)
    idle.demote(1)
    idle.check()
    assert (len(idle), idle.evictable, idle.unpinned, idle.pinned) == (4, 3, 1, 3)
    assert [idle.take() for _ in range(3)] == [3, 1, 2]
    with pytest.raises(KeyError):
        idle.take()
    assert (list(idle), idle.pinned, idle.kind(1)) == ([0], 1, None)
    assert idle.unpin(0, name_of(0))
    assert not idle.unpin(0, name_of(0))
    idle.check()
    assert idle.take() == 0


def test_pins_of_leased_blocks_count_when_they_come_back() -> None:
    idle = an_idle(0, 1)
    idle.drop(0)
    assert idle.pin(0, name_of(0), PinKind.HARD, 9.0)
    assert (len(idle), idle.pinned) == (1, 1)
    idle.touch(0, name_of(0))
    idle.check()
    assert (len(idle), idle.evictable) == (2, 1)


def test_pins_end_by_time_and_the_last_one_counts() -> None:
    idle = an_idle(0, 1, 2)
    names = [name_of(slot) for slot in range(9)]
    for slot, end in ((0, 5.0), (1, 5.0), (1, 8.0), (2, 8.0), (2, 5.0)):
        assert idle.pin(slot, name_of(slot), PinKind.SOFT, end)
    idle.end_pins(4.9, names)
    assert idle.pinned == 3
    idle.end_pins(5.0, names)
    idle.check()
    assert (idle.pinned, idle.kind(1)) == (1, PinKind.SOFT)
    idle.end_pins(8.0, names)
    assert (idle.pinned, idle.unpinned) == (0, 3)


def test_hard_pins_are_bounded_and_a_refused_one_changes_nothing() -> None:
    pins = Pins(hard_max=2)
    assert all(pins.put(slot, PinKind.HARD, 1.0) for slot in (0, 1))
    assert pins.put(2, PinKind.SOFT, 1.0)
    assert not pins.put(2, PinKind.HARD, 9.0)
    assert (pins.kind(2), len(pins)) == (PinKind.SOFT, 3)
    assert pins.put(1, PinKind.HARD, 2.0)  # again
    assert pins.put(0, PinKind.SOFT, 2.0)
    assert pins.put(2, PinKind.HARD, 2.0)
    pins.check()
    for end in range(1000):
        pins.put(2, PinKind.HARD, 9.0 + end)
    pins.check()
    assert sorted(pins.over(2.0)) == [0, 1]
    assert pins.over(1007.9) == []
    assert pins.over(1008.0) == [2]
    assert not pins.drop(2)
