"""A walk along slots finds what a walk name by name finds, wherever blocks lie."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvcache_pool.names import Names, where
from protocol.ids import BlockHash

CHAIN = [BlockHash(bytes([number]) * 32) for number in range(12)]
STRANGER = BlockHash(b"?" * 32)

Held = list[list[int]]
"""Of each segment the blocks of the chain that it has, in the order of its slots."""


def runs() -> st.SearchStrategy[list[int]]:
    """Blocks of a segment: pieces of the chain in any order, each block once."""
    pieces = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=5)
    return pieces.map(lambda ends: [*dict.fromkeys(b for start, size in ends for b in range(12)[start:][:size])])


def pool_of(held: Held, gaps: Sequence[int]) -> tuple[Names, dict[int, list[BlockHash | None]]]:
    """Names and tables of segments that lie so, with so many slots of something else before each block."""
    names, tables = Names(), dict[int, list[BlockHash | None]]()
    for home, blocks in enumerate(held, start=1):
        table: list[BlockHash | None] = []
        for at, block in enumerate(blocks):
            table += [STRANGER, None][:: 1 - 2 * (at % 2)][: gaps[block % len(gaps)]]
            names.add(CHAIN[block], where(home, len(table)))
            table.append(CHAIN[block])
        tables[home] = table
    return names, tables


def leading(has: set[int]) -> int:
    return next((block for block in range(12) if block not in has), 12)


@given(st.lists(runs(), max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_a_walk_goes_as_far_as_the_names(held: Held, gaps: list[int]) -> None:
    names, tables = pool_of(held, gaps)
    reach, alone = names.reach(CHAIN, tables)
    assert reach == leading({block for blocks in held for block in blocks})
    assert alone == {home: leading({*blocks}) for home, blocks in enumerate(held, start=1) if 0 in blocks}


def test_the_names_that_are_asked_for_end_the_walk() -> None:
    names, tables = pool_of([[*range(12)]], [0])
    assert names.reach([], tables) == (0, {})
    assert names.reach(CHAIN[:5], tables) == (5, {1: 5})
    assert names.reach([*CHAIN, STRANGER], tables) == (12, {1: 12})
    assert names.reach(CHAIN[3:], tables) == (9, {1: 9})
