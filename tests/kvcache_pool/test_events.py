"""KV events without sockets: what is told, in which form, and that who misses some can still know all."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_pool.events import DISK, NAMES_MAX, RING_BATCHES, Events
from protocol.ids import BlockHash, Incarnation, token_ids
from tests.kvcache_pool.builders import an_index, cache, names
from tests.kvcache_pool.vllm_events import (
    AllBlocksCleared,
    ArrayBatch,
    ArrayCleared,
    ArrayRemoved,
    ArrayStored,
    BlockRemoved,
    BlockStored,
    MapBatch,
    ShortBatch,
)

LIFE = Incarnation("one")
STEP = 2
"""Tokens in a block of these tests."""


def begun(**bounds: int) -> Events:
    """Whose first batch is told."""
    events = Events(LIFE, STEP, **bounds)
    events.flush(0.0)
    return events


def told(events: Events, ts: float = 1.0) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """All events of the next flush, as a listener reads them."""
    return [
        event for _, batch in events.flush(ts) for event in msgspec.msgpack.decode(batch, type=MapBatch).events
    ]


def test_a_life_begins_with_number_0_and_an_empty_cache() -> None:
    events = Events(LIFE, STEP)
    assert events.pending
    ((number, batch),) = events.flush(1.5)
    assert number == 0
    assert msgspec.msgpack.decode(batch, type=MapBatch) == MapBatch(1.5, [AllBlocksCleared()], 0)
    assert not events.pending
    assert events.flush(2.0) == []


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_listener_with_vllms_structs_reads_every_event_of_its_form(form: str) -> None:
    events = Events(LIFE, STEP, "map" if form == "map" else "array")
    batch_type = MapBatch if form == "map" else ArrayBatch
    kinds = (AllBlocksCleared, BlockStored, BlockRemoved)
    cleared, stored, removed = kinds if form == "map" else (ArrayCleared, ArrayStored, ArrayRemoved)
    one, two, parent = names(1, 2, 9)
    events.tell([one, two], token_ids([5, 6, 7, 4_000_000_000]), parent)
    events.stored(two)
    events.stored(one)
    events.removed(parent)
    ((_, batch),) = events.flush(1.0)
    assert msgspec.msgpack.decode(batch, type=batch_type).events == [
        cleared(),
        stored([one, two], parent, [5, 6, 7, 4_000_000_000], STEP, None, "CPU", None),
        removed([parent], "CPU"),
    ]


def test_a_listener_that_knows_fewer_elements_ignores_ours() -> None:
    ((_, batch),) = Events(LIFE, STEP).flush(1.0)
    assert msgspec.msgpack.decode(batch) == [1.0, [{"type": "AllBlocksCleared"}], 0, "one"]
    assert msgspec.msgpack.decode(batch, type=ShortBatch) == ShortBatch(1.0, [AllBlocksCleared()])


def test_blocks_that_were_there_already_cut_the_row() -> None:
    events = begun()
    row = names(1, 2, 3, 4, 5)
    events.tell(row, token_ids(range(10)), None)
    for name in (row[4], row[3], row[0]):
        events.stored(name)
    assert told(events) == [
        BlockStored(row[:1], None, [0, 1], STEP, None, "CPU", None),
        BlockStored(row[3:], row[2], [6, 7, 8, 9], STEP, None, "CPU", None),
    ]
    events.stored(row[1])  # what was told then is not known of this
    assert told(events) == [BlockStored(row[1:2], None, [], STEP, None, "CPU", None)]


def test_tokens_that_do_not_fit_are_refused_and_not_told() -> None:
    events = begun()
    with pytest.raises(ValueError, match="2 blocks of 2 tokens do not have 3 tokens"):
        events.tell(names(1, 2), token_ids([1, 2, 3]), None)
    events.stored(names(1)[0])
    assert told(events) == [BlockStored(names(1), None, [], STEP, None, "CPU", None)]


def test_a_removal_names_the_medium_under_which_the_name_was_stored() -> None:
    events = begun()
    one, two = names(1, 2)
    events.stored(one, DISK)
    events.stored(two)
    assert [event.medium for event in told(events)] == ["DISK", "CPU"]
    events.removed(one)
    events.removed(two)
    assert told(events) == [BlockRemoved([one], "DISK"), BlockRemoved([two], "CPU")]
    events.stored(one)
    events.removed(one)
    assert told(events)[1] == BlockRemoved([one], "CPU")


def test_a_large_change_comes_in_several_batches() -> None:
    events = begun()
    many = names(*range(2 * NAMES_MAX + 1))
    for name in many:
        events.stored(name)
    batches = events.flush(1.0)
    assert [number for number, _ in batches] == [1, 2, 3]
    read = [msgspec.msgpack.decode(batch, type=MapBatch) for _, batch in batches]
    assert [name for batch in read for event in batch.events for name in event.block_hashes] == many
    assert max(len(event.block_hashes) for batch in read for event in batch.events) == NAMES_MAX


def test_what_is_kept_is_bounded_by_count_and_by_bytes() -> None:
    events = begun(ring_batches=5)
    for _ in range(9):
        events.cleared()
        events.flush(1.0)
    assert [number for number, _ in events.since(0)] == [5, 6, 7, 8, 9]
    assert [number for number, _ in events.since(8)] == [8, 9]
    assert events.since(10) == events.since((1 << 64) - 1) == []
    assert events.dropped == 5
    small = begun(ring_bytes=100)
    for number in range(9):
        small.stored(names(number)[0])
        small.flush(1.0)
    assert sum(len(batch) for _, batch in small.since(0)) <= 100
    assert Events(LIFE, STEP)._ring_batches == RING_BATCHES


class Listener:
    """As docs/events.md says."""

    def __init__(self) -> None:
        self.blocks: set[BlockHash] = set()
        self.wanted = 0
        self.lost = False
        """It had to forget, and may know less than there is."""

    def take(self, number: int, batch: bytes) -> bool:
        if number > self.wanted:
            return False
        if number == self.wanted:
            self.wanted += 1
            for event in msgspec.msgpack.decode(batch, type=MapBatch).events:
                if isinstance(event, BlockStored):
                    self.blocks.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    self.blocks.difference_update(event.block_hashes)
                else:
                    self.blocks.clear()
                    self.lost = False
        return True

    def catch_up(self, events: Events) -> None:
        for number, batch in events.since(self.wanted):
            if not self.take(number, batch):
                self.blocks.clear()
                self.wanted, self.lost = number, True
                self.take(number, batch)


CALLS = st.one_of(
    st.tuples(st.just("cache"), st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True)),
    st.tuples(st.sampled_from(["clear", "segment"]), st.just([])),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 12), max_size=3)),
)


@given(st.lists(st.tuples(CALLS, st.booleans()), max_size=40), st.integers(2, 60))
def test_who_misses_any_and_asks_again_knows_exactly_what_the_index_holds(
    calls: list[tuple[tuple[str, list[int]], bool]], kept: int
) -> None:
    events = Events(LIFE, 16, ring_batches=kept)
    index = an_index(recorder=events, kv=6, other=3)
    listener = Listener()
    for (what, numbers), heard in calls:
        if what == "cache":
            cache(index, *numbers, near="other" if numbers[0] % 2 else "kv")
        elif what == "remove":
            index.remove(names(*numbers))
        elif what == "clear":
            index.clear()
            if not index.stats().cached:
                events.cleared()
        else:
            for slots in [one for one in index.segment_stats() if one.segment == "other"]:
                index.leave(slots.segment, slots.incarnation)
        for number, batch in events.flush(1.0):
            if heard and not listener.take(number, batch):
                listener.catch_up(events)
    listener.catch_up(events)
    held = {name for name, _, _ in index.named()}
    assert listener.blocks == held or (listener.lost and listener.blocks < held)
    assert listener.lost <= (events.dropped > 0)
