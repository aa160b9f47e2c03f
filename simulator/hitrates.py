"""How much of a sequence of prompts one pool of a given size finds again: a trace replayed through the index.

This is the index that serves, one request at a time: looked up, leased, committed, released. So the hit rate
is that of its eviction, and nothing of scheduling, copies or requests in flight is in it.
"""

from collections.abc import Iterable, Sequence

from kvcache_pool.api import Acquire, Place
from kvcache_pool.index import Index
from protocol.blocks import BlockLayout
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId

SEGMENT = SegmentId("pool")
"""The one segment: a pool that all instances share."""

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=1, kv_type="float32")
"""Any: no bytes are moved."""

ID_BYTES = 8
"""Of a trace's block id as a name; traces count their blocks from 0."""


def hit_rate(prompts: Iterable[Sequence[int]], capacity: int | None) -> float:
    """The share of all prompts' blocks that are found cached, from the front of each prompt to its first miss.

    `prompts` are block ids in the order of arrival: within one prompt all differ, and equal ids mean equal
    prefixes. `capacity` is in blocks; None is no bound. Of a prompt that is longer, its front is kept. O(blocks).
    """
    chains = [[BlockHash(block.to_bytes(ID_BYTES, "big")) for block in prompt] for prompt in prompts]
    blocks = sum(map(len, chains))
    slots = blocks if capacity is None else capacity
    index = Index()
    place = Place(SEGMENT, Incarnation("1"), address="", host="", shm="", slots=slots, layout=LAYOUT)
    index.announce(place, generation=0, now=0.0)
    hits = sum(_serve(index, LeaseId(str(number)), chain[:slots]) for number, chain in enumerate(chains))
    return hits / blocks if blocks else 0.0


def _serve(index: Index, lease: LeaseId, chain: list[BlockHash]) -> int:
    """One request, from lookup to release. Returns how many blocks it found."""
    reach = index.find(chain).reach
    granted = index.acquire(Acquire(lease, lease, chain, reuse=reach, unnamed=0, near=SEGMENT), now=0.0)
    index.commit(lease, list(range(len(granted.targets))), chain[reach:], now=0.0)
    index.release(lease)
    return reach
