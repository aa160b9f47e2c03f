"""How much of a sequence of prompts one pool of a given size finds again: a trace replayed through the index.

This is the index that serves, one request at a time: looked up, leased, committed, released. So the hit rate
is that of its eviction, and nothing of scheduling, copies or requests in flight is in it.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvcache_pool.api import Acquire, Place
from kvcache_pool.index import Index
from kvcache_pool.slots import Shares
from protocol.blocks import BlockLayout
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId
from simulator.workload import BLOCK_TOKENS, Arrival

SEGMENT = SegmentId("pool")
"""The one segment: a pool that all instances share."""

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=1, kv_type="float32")
"""Any: no bytes are moved."""

ID_BYTES = 8
"""Of a trace's block id as a name; traces count their blocks from 0."""


def hit_rate(
    prompts: Iterable[Sequence[int]], capacity: int | None, eviction: str = "lru", watermark: float = 1.0
) -> float:
    """The share of all prompts' blocks that are found cached, from the front of each prompt to its first miss.

    `prompts` are block ids in the order of arrival: within one prompt all differ, and equal ids mean equal
    prefixes. `capacity` is in blocks; None is no bound. Of a prompt that is longer, its front is kept.
    `eviction` and `watermark` are settings of the directory, which sweeps after each prompt. O(blocks).
    """
    chains = list(prompts)
    blocks = sum(map(len, chains))
    return sum(_hits(chains, capacity, eviction, watermark)) / blocks if blocks else 0.0


def ideal_hit_rate(arrivals: Sequence[Arrival], capacity_tokens: int) -> float:
    """The share of all prompts' tokens that one pool of this capacity would have to load, were each prompt stored
    before the next one came: what a run of the services can be held against. As there, only full blocks are kept,
    and a prompt's last token is computed in any case. O(blocks)."""
    full = [arrival.blocks[: arrival.tokens // BLOCK_TOKENS] for arrival in arrivals]
    hits = _hits(full, capacity_tokens // BLOCK_TOKENS)
    loaded = sum(min(hit, (one.tokens - 1) // BLOCK_TOKENS) for hit, one in zip(hits, arrivals, strict=True))
    return loaded * BLOCK_TOKENS / max(sum(arrival.tokens for arrival in arrivals), 1)


def _hits(
    prompts: Sequence[Sequence[int]], capacity: int | None, eviction: str = "lru", watermark: float = 1.0
) -> Iterator[int]:
    """Blocks found cached, prompt by prompt."""
    slots = sum(map(len, prompts)) if capacity is None else capacity
    if not slots:
        yield from [0] * len(prompts)  # no segment is that small
        return
    index = Index(Shares(eviction=eviction, watermark=watermark))
    place = Place(SEGMENT, Incarnation("1"), address="", host="", shm="", slots=slots, layout=LAYOUT)
    index.announce(place, generation=0, now=0.0)
    for number, prompt in enumerate(prompts):
        chain = [BlockHash(block.to_bytes(ID_BYTES, "big")) for block in prompt[:slots]]
        yield _serve(index, LeaseId(str(number)), chain)
        index.trim()


def _serve(index: Index, lease: LeaseId, chain: list[BlockHash]) -> int:
    """One request, from lookup to release. Returns how many blocks it found."""
    reach = index.find(chain).reach
    granted = index.acquire(Acquire(lease, lease, chain, reuse=reach, unnamed=0, near=SEGMENT), now=0.0)
    index.commit(lease, list(range(len(granted.targets))), chain[reach:], now=0.0)
    index.release(lease)
    return reach
