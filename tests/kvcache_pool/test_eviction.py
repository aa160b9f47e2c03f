"""The order of eviction, and the hit rate that it gives on real prompts."""

import gzip
import json
from collections import OrderedDict
from pathlib import Path

import pytest

from kvcache_pool.eviction import LeastRecent
from tests.kvcache_pool.builders import an_index, cache

TRACE = Path(__file__).parent / "data" / "conversation_600.jsonl.gz"


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


def read_trace() -> list[list[int]]:
    return [json.loads(line) for line in gzip.decompress(TRACE.read_bytes()).splitlines()]


def hit_rate_of_a_plain_lru(requests: list[list[int]], capacity: int) -> float:
    """Independent of the index: an ordered dict, touched from last to first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in requests:
        for block in blocks:
            if block not in kept:
                break
            hits += 1
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
            if len(kept) > capacity:
                kept.popitem(last=False)
    return hits / sum(map(len, requests))


@pytest.mark.parametrize(("capacity", "expected"), [(300, 0.0363), (4000, 0.0809), (14000, 0.1687)])
def test_the_hit_rate_on_real_prompts_is_that_of_lru(capacity: int, expected: float) -> None:
    requests = read_trace()
    index = an_index(kv=capacity)
    hits = sum(len(cache(index, *blocks, now=float(at)).sources) for at, blocks in enumerate(requests))
    rate = hits / sum(map(len, requests))
    assert rate == hit_rate_of_a_plain_lru(requests, capacity)
    assert rate == pytest.approx(expected, abs=5e-5)
    index.check()
