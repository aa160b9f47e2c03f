"""The order of eviction by itself."""

import pytest

from kvcache_pool.eviction import LeastRecent


def test_the_least_recently_touched_goes_first() -> None:
    order: LeastRecent[str] = LeastRecent()
    for block in "abcab":
        order.touch(block)
    order.drop("b")
    order.drop("never there")
    assert list(order) == ["c", "a"]
    assert "b" not in order
    assert (order.take(), order.take(), len(order)) == ("c", "a", 0)
    with pytest.raises(KeyError):
        order.take()


def test_what_is_demoted_is_the_next_to_go() -> None:
    order: LeastRecent[str] = LeastRecent()
    for block in "abc":
        order.touch(block)
    order.demote("c")
    order.demote("never there")
    assert list(order) == ["c", "a", "b"]
    order.touch("c")
    assert list(order) == ["a", "b", "c"]
