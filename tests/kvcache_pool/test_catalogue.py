"""What a segment notes down, and what a directory that knows nothing makes of it."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_pool import news
from kvcache_pool.announcing import announce_once
from kvcache_pool.api import NOTES_MAX, Announce, Announced, Catalogue, Counted, Directory, Grant, Note, Priority
from kvcache_pool.index import Index
from kvcache_pool.service import DirectoryService
from kvcache_pool.transfer.mover import PoolMover
from protocol.errors import RemoteError
from protocol.ids import BlockHash, Incarnation, SegmentId
from protocol.rpc import Client, Server
from tests.kvcache_pool.builders import (
    HOST,
    LAYOUT,
    Pool,
    a_place,
    a_pool,
    an_ask,
    an_index,
    cache,
    names,
    random_runs,
)

KV = SegmentId("kv")


def a_note(slot: int, generation: int, number: int) -> Note:
    return Note(slot, generation, names(number)[0])


def an_old_index(notes: Sequence[Note], slots: int = 4) -> tuple[Index, int]:
    """A directory that has just heard of a segment with these notes, and how many it took."""
    index = Index()
    index.announce(a_place(slots=slots), 100, 0.0)
    count = index.adopt(KV, Incarnation("a"), notes)
    index.check()
    return index, count


def test_news_are_told_until_they_are_noted_each_slot_once() -> None:
    told = news.News()
    for generation, number in enumerate((1, 2, 3)):
        told.tell(Grant(KV, 0 if number == 3 else number, generation), names(number)[0])
    told.tell(Grant(KV, 1, 9), b"")
    expected = [a_note(2, 1, 2), a_note(0, 2, 3), Note(1, 9, b"")]
    assert told.since(0) == (expected, 4)
    assert told.since(0) == (expected, 4)
    assert told.since(3) == (expected[2:], 4)
    assert told.since(4) == ([], 4)
    assert len(told) == 0


def test_news_come_in_parts() -> None:
    told = news.News()
    for slot in range(NOTES_MAX + 1):
        told.tell(Grant(KV, slot, 1), b"")
    first, number = told.since(0)
    assert (len(first), number) == (NOTES_MAX, NOTES_MAX)
    assert told.since(number) == ([Note(NOTES_MAX, 1, b"")], NOTES_MAX + 1)


def test_a_new_directory_finds_what_the_segment_noted() -> None:
    index, count = an_old_index([a_note(0, 5, 1), a_note(3, 6, 2)])
    assert count == 2
    lease = index.acquire(an_ask(names(1, 2, 3)), 0.0)
    assert lease.sources == [Grant(KV, 0, 5), Grant(KV, 3, 6)]
    assert lease.targets[0].slot in (1, 2)
    assert lease.targets[0].generation > 100
    index.check()


def test_what_was_written_first_is_evicted_first() -> None:
    index, _ = an_old_index([a_note(0, 5, 1), a_note(3, 6, 2)])
    index.acquire(an_ask(names(7, 8, 9)), 0.0)
    assert index.find(names(1)).reach == 0
    assert index.find(names(2)).reach == 1


def test_a_slot_in_use_keeps_its_new_use() -> None:
    index = Index()
    index.announce(a_place(slots=1), 100, 0.0)
    lease = index.acquire(an_ask(names(8)), 0.0)
    assert index.adopt(KV, Incarnation("a"), [a_note(0, 5, 1)]) == 0
    index.commit(lease.lease, [0], names(8), 0.0)
    assert index.find(names(8)).reach == 1
    index.check()


@pytest.mark.parametrize(
    "notes",
    [
        [a_note(4, 5, 1)],
        [a_note(-1, 5, 1)],
        [a_note(0, 0, 1)],
        [a_note(0, 1 << 40, 1)],
    ],
    ids=["no such slot", "negative slot", "no generation", "generation of the future"],
)
def test_notes_that_cannot_be_are_left(notes: list[Note]) -> None:
    assert an_old_index(notes)[1] == 0


def test_two_notes_of_one_name_or_of_one_slot_make_one_block() -> None:
    index, count = an_old_index([a_note(0, 5, 1), a_note(1, 6, 1), a_note(2, 7, 2), a_note(2, 8, 3)])
    assert count == 2
    assert index.stats().cached == 2


def test_another_lifes_catalogue_is_not_taken() -> None:
    index, _ = an_old_index([])
    assert index.adopt(KV, Incarnation("b"), [a_note(0, 5, 1)]) == 0
    assert index.adopt(SegmentId("other"), Incarnation("a"), [a_note(0, 5, 1)]) == 0
    assert index.find(names(1)).reach == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30), st.integers(1, 3))
def test_noted_is_cached(chains: list[tuple[int, int]], every: int) -> None:
    """Whoever notes all news has what the index has, whatever was cached and evicted."""
    index = an_index(kv=4)
    noted: dict[int, Note] = {}
    number = 0
    for step, (first, count) in enumerate(chains):
        cache(index, *range(first, first + min(count, 4)))
        if step % every == 0:
            told, number = index.news(KV, number)
            noted.update({note.slot: note for note in told})
    told, _ = index.news(KV, number)
    noted.update({note.slot: note for note in told})
    expected = {(name, grant.slot, grant.generation) for name, _, grant in index.named()}
    assert {(note.name, note.slot, note.generation) for note in noted.values() if note.name} == expected


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 6) as pool:
        yield pool


@asynccontextmanager
async def a_new_directory(pool: Pool) -> AsyncIterator[Client]:
    server = Server(pool.transport.bind("tcp://127.0.0.1:0"), DirectoryService(Index()).handlers())
    task = asyncio.create_task(server.serve())
    try:
        async with Client(pool.transport, server.address) as client:
            yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def write_and_commit(pool: Pool, mover: PoolMover, blocks: list[BlockHash]) -> np.ndarray:
    lease = await pool.directory.acquire(an_ask(blocks))
    mover.know(lease.places)
    runs = random_runs(len(blocks))
    for layer in range(LAYOUT.layers):
        await mover.write(layer, lease.targets, runs, range(len(blocks)), Priority.STORE)
    await pool.directory.commit(lease.lease, [*range(len(blocks))], blocks)
    await pool.directory.release(lease.lease)
    return runs


async def test_a_restarted_directory_is_warm_and_no_byte_is_wrong(pool: Pool) -> None:
    mover = PoolMover(pool.transport, HOST)
    blocks = names(1, 2, 3)
    runs = await write_and_commit(pool, mover, blocks)
    segment, place = pool.segments[0], pool.place()
    async with Client(pool.transport, pool.address) as old:
        number = await announce_once(old, segment, place, 0)
        await pool.directory.clear()
        await write_and_commit(pool, mover, blocks[:2])
        number = await announce_once(old, segment, place, number)
    async with a_new_directory(pool) as client:
        await announce_once(client, segment, place, number)
        directory = Directory(client)
        assert (await directory.lookup(blocks)).reach == 2, "cleared means cleared, for the next directory too"
        lease = await directory.acquire(an_ask(blocks))
        mover.know(lease.places)
        out = np.zeros((2, LAYOUT.run_bytes), np.uint8)
        assert await mover.read(1, lease.sources, out, [0, 1], Priority.LOAD) == 2
        assert np.array_equal(out, runs[:2])
    await mover.aclose()


async def test_a_catalogue_that_is_none_is_refused(pool: Pool) -> None:
    segment = SegmentId("kv-0")
    incarnation = pool.segments[0].incarnation
    async with Client(pool.transport, pool.address) as client:
        for notes in ([Note(0, 1, b"short")], [a_note(0, 1, 1)] * (NOTES_MAX + 1)):
            with pytest.raises(RemoteError, match=r"a block's name has 32 bytes|at most 4096 notes"):
                await client.call(Catalogue(segment, incarnation, notes), Counted, within_s=5.0)
    assert (await pool.directory.stats()).cached == 0


async def test_a_lost_answer_does_not_lose_the_catalogue(pool: Pool) -> None:
    mover = PoolMover(pool.transport, HOST)
    blocks = names(1, 2, 3)
    await write_and_commit(pool, mover, blocks)
    segment, place = pool.segments[0], pool.place()
    async with Client(pool.transport, pool.address) as old:
        number = await announce_once(old, segment, place, 0)
    async with a_new_directory(pool) as client:
        unheard = await client.call(Announce(place, segment.generation, number), Announced, within_s=5.0)
        assert unheard.joined
        await announce_once(client, segment, place, number)
        assert (await Directory(client).lookup(blocks)).reach == 3
        told = await client.call(Announce(place, segment.generation), Announced, within_s=5.0)
        assert not told.joined
    await mover.aclose()


class Watched(array):  # type: ignore[type-arg]
    """An array that counts how many of its elements were looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        Watched.looks += 1
        return super().__getitem__(at)

    def pop(self, at: int = -1) -> Any:
        Watched.looks += 1
        return super().pop(at)

    def __iter__(self) -> Iterator[Any]:
        Watched.looks += len(self)
        return super().__iter__()


def test_a_catalogue_costs_what_its_notes_cost_and_not_what_the_segment_has() -> None:
    """In each of its parts; and so does finding afterwards what is free."""
    slots, parts = 1 << 20, 8
    index = Index()
    index.announce(a_place(slots=slots), slots, 0.0)
    tables = index._segments[KV]
    for table in ("generations", "_vacant", "leases"):
        setattr(tables, table, Watched("Q", getattr(tables, table)))
    Watched.looks = 0
    for start in range(0, parts * NOTES_MAX, NOTES_MAX):
        part = [a_note(slot, slot + 1, slot) for slot in range(start, start + NOTES_MAX)]
        assert index.adopt(KV, Incarnation("a"), part) == NOTES_MAX
    lease = index.acquire(an_ask([], unnamed=NOTES_MAX), 0.0)
    assert {grant.slot for grant in lease.targets} == {parts * NOTES_MAX + number for number in range(NOTES_MAX)}
    assert parts * NOTES_MAX < Watched.looks < 8 * parts * NOTES_MAX < slots


def test_slots_that_are_adopted_again_and_again_leave_nothing() -> None:
    """As by a segment that lies: whenever its blocks have gone, it brings others that it says it had."""
    index, _ = an_old_index([])
    for first in range(10, 70, 3):
        notes = [a_note(slot, 5 + slot, first + slot) for slot in range(3)]
        assert index.adopt(KV, Incarnation("a"), notes) == 3
        index.check()
        assert index.remove(names(first, first + 1, first + 2)) == 3
        assert index.adopt(KV, Incarnation("a"), notes) == 0
        index.check()
    assert len(index.acquire(an_ask(names(7, 8, 9, 10)), 0.0).targets) == 4
    index.check()
