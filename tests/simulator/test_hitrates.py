"""The index keeps what a plain least-recently-used cache keeps, on any prompts and on the public traces."""

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.hitrates import hit_rate
from simulator.workload import load_trace


def hit_rate_of_a_plain_lru(prompts: Sequence[Sequence[int]], capacity: int | None) -> float:
    """Independent of the index: an ordered dict, touched from last to first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in prompts:
        for block in blocks:
            if block not in kept:
                break
            hits += 1
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
            if capacity is not None and len(kept) > capacity:
                kept.popitem(last=False)
    total = sum(map(len, prompts))
    return hits / total if total else 0.0


@st.composite
def sessions(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that go on from where earlier ones were cut: equal ids mean equal prefixes."""
    prompts: list[list[int]] = [[]]
    fresh = 0
    for _ in range(draw(st.integers(0, 30))):
        before = draw(st.sampled_from(prompts))
        shared, more = draw(st.integers(0, len(before))), draw(st.integers(0, 5))
        prompts.append([*before[:shared], *range(fresh, fresh + more)])
        fresh += more
    return prompts


@given(sessions(), st.one_of(st.none(), st.integers(0, 40)))
def test_the_hit_rate_is_that_of_a_plain_lru(prompts: list[list[int]], capacity: int | None) -> None:
    assert hit_rate(prompts, capacity) == hit_rate_of_a_plain_lru(prompts, capacity)


def test_hits_end_at_the_first_miss_and_the_front_outlives_the_end() -> None:
    prompts = [[0, 1, 2], [7, 8], [0, 1, 2], [0, 1, 2]]
    assert hit_rate(prompts, None) == pytest.approx(6 / 11)
    assert hit_rate(prompts, 4) == pytest.approx(5 / 11)
    assert hit_rate(prompts, 2) == pytest.approx(2 / 11)  # of a prompt that is too long, its front is kept
    assert hit_rate(iter(prompts), 0) == hit_rate([], 4) == 0.0


SCANNED = [[0, 1], [0, 1], [0, 1], *([n] for n in range(10, 20)), [0, 1]]
"""Two blocks that are used again and again, and ten that are used once."""


@pytest.mark.parametrize(("eviction", "hits"), [("lru", 4), ("lfu", 6), ("s3_fifo", 6)])
def test_a_scan_ends_what_lru_keeps_and_not_what_its_rivals_keep(eviction: str, hits: int) -> None:
    assert hit_rate(SCANNED, 10, eviction) == pytest.approx(hits / 18)


def test_what_is_trimmed_is_not_found() -> None:
    prompts = [[*range(10)], [*range(10)]]
    assert hit_rate(prompts, 10) == 0.5
    assert hit_rate(prompts, 10, watermark=0.9) == pytest.approx(8 / 20)


@pytest.mark.parametrize(
    ("trace", "rates"),
    [
        ("conversation", {1_000: 0.045, 30_000: 0.326, None: 0.366}),
        ("synthetic", {1_000: 0.084, 10_000: 0.424, 30_000: 0.624, None: 0.640}),
    ],
)
def test_the_public_traces_give_their_known_rates(trace: str, rates: dict[int | None, float]) -> None:
    prompts = [arrival.blocks for arrival in load_trace(trace)]
    assert {capacity: round(hit_rate(prompts, capacity), 3) for capacity in rates} == rates
