"""How a listener declares vLLM's KV events for msgspec, once for each form in which vLLM has sent them.

The names, the order and the options of the fields are the wire format; nothing here knows our encoder.
"""

from typing import Any

import msgspec

Hash = bytes | int


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The batch is an array in both forms."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class MapEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM since June 2026."""


class BlockStored(MapEvent):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(MapEvent):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(MapEvent):
    pass


class MapBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """vLLM before."""


class ArrayStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class ArrayRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class ArrayCleared(ArrayEvent, tag="AllBlocksCleared"):
    pass


class ArrayBatch(EventBatch):
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]


class ShortBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As vLLM's example subscriber has it: it knows neither the rank nor what comes after."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
