"""The most used blocks are counted by name, and looked up in the index only now and then."""

from kvcache_pool.api import Acquire, Place, new_lease
from kvcache_pool.index import Index
from protocol.blocks import BlockLayout, HashRoot, block_hashes
from protocol.ids import Ids, Incarnation, SegmentId
from simulator.hot import EVERY, HOT_BLOCKS, Hot

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=2, kv_type="float32")
ROOT = HashRoot("model", "tokenizer", LAYOUT)


def an_index() -> Index:
    index = Index()
    for name in "ab":
        index.announce(Place(SegmentId(name), Incarnation(name), "", "", "", 8, LAYOUT), 0, 0.0)
    return index


def cache(index: Index, prompt: Ids, segment: str) -> None:
    names = block_hashes(ROOT, prompt)
    lease = index.acquire(Acquire(new_lease(), "r", names, reuse=0, unnamed=0, near=SegmentId(segment)), 0.0)
    index.commit(lease.lease, list(range(len(names))), names, 0.0)
    index.release(lease.lease)


def test_the_most_used_blocks_come_first_and_a_tail_has_no_name() -> None:
    hot, index = Hot(ROOT), an_index()
    shared, own = Ids("I", [1, 1]), Ids("I", [1, 1, 2, 2, 3])
    for prompt in (own, shared, shared):
        hot.use(prompt)
    for segment in "ab":
        cache(index, shared, segment)
    assert hot.copies(index) == [2, 0]


def test_they_are_looked_up_anew_at_each_tenth_sample() -> None:
    hot, index = Hot(ROOT), an_index()
    hot.use(Ids("I", [1, 1]))
    assert hot.copies(index) == [0]
    cache(index, Ids("I", [1, 1]), "a")
    assert [hot.copies(index) for _ in range(EVERY)] == [[0]] * (EVERY - 1) + [[1]]


def test_no_more_are_told_than_are_asked_for() -> None:
    hot = Hot(ROOT)
    hot.use(Ids("I", range(4 * HOT_BLOCKS)))
    assert hot.copies(an_index()) == [0] * HOT_BLOCKS
