"""KV events over real sockets, from a real directory to listeners that know only the documents."""

import asyncio
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvcache_pool.announcing import announce_once
from kvcache_pool.api import Announce, Announced, Commit, Directory, Done, Goodbye
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.door import TOPICS_MAX, end_connection
from kvcache_pool.events import Events
from kvcache_pool.index import Index
from kvcache_pool.publisher import END, LISTENERS_MAX, REPLAY_BATCHES_MAX, REQUEST_BYTES_MAX, Publisher
from kvcache_pool.service import DirectoryService
from protocol.errors import RemoteError
from protocol.ids import BlockHash, Incarnation, token_ids
from protocol.registry import Load
from protocol.rpc import Client, Server
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import LAYOUT, Blank, a_place, an_ask, names
from tests.kvcache_pool.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, MapBatch

TOPIC = "kv@kvcache-0@tiny"
ANY = "tcp://127.0.0.1:0"
STEP = LAYOUT.block_tokens
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "events.md"


async def announce(client: Client, slots: int) -> None:
    number = 0
    while True:
        number = await announce_once(client, Blank(), a_place(slots=slots), number)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def a_directory(
    life: str = "one", address: str = ANY, replay: str = ANY, slots: int = 8
) -> AsyncIterator[tuple[Directory, Publisher, Client]]:
    """A real service of one segment, which publishes."""
    transport = ZmqTransport()
    publisher = Publisher(Events(Incarnation(life), STEP), TOPIC, address, replay)
    service = DirectoryService(Index(silent_s=60.0, recorder=publisher.events), publisher)
    server = Server(transport.bind(ANY), service.handlers())
    tasks = [asyncio.create_task(loop) for loop in (server.serve(), publisher.serve(), service.sweep())]
    try:
        async with asyncio.timeout(20.0), Client(transport, server.address) as client:
            await client.call(Announce(a_place(slots=slots)), Announced, within_s=5.0)
            tasks.append(asyncio.create_task(announce(client, slots)))
            yield Directory(client), publisher, client
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.close()
        transport.close()


async def put(directory: Directory, *numbers: int) -> None:
    """These blocks, in a row from the front of a prompt, with the tokens number, number, ..."""
    lease = await directory.acquire(an_ask(names(*numbers)))
    assert lease.wants_tokens
    have = len(lease.sources)
    new = numbers[have:]
    tokens = token_ids(number for number in new for _ in range(STEP))
    parent = names(numbers[have - 1])[0] if have else None
    await directory.commit(lease.lease, list(range(len(new))), names(*new), tokens, parent)
    await directory.release(lease.lease)


class Sockets:
    """Of one listener; closed with its test."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.open: list[zmq.asyncio.Socket] = []

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        self.open.append(self.context.socket(kind))
        return self.open[-1]


@pytest.fixture
async def context() -> AsyncIterator[Sockets]:
    sockets = Sockets()
    yield sockets
    for one in sockets.open:
        one.close(0)
    sockets.context.term()


async def subscribed(context: Sockets, publisher: Publisher) -> zmq.asyncio.Socket:
    """A SUB that is known to hear: something was published until it did."""
    sub = context.socket(zmq.SUB)
    sub.subscribe(TOPIC)
    sub.connect(publisher.address)
    async with asyncio.timeout(5.0):
        while not await sub.poll(20):
            publisher.events.cleared()
            publisher.publish()
    while await sub.poll(50):
        await sub.recv_multipart()
    return sub


async def heard(sub: zmq.asyncio.Socket) -> tuple[int, MapBatch]:
    topic, number, batch = await asyncio.wait_for(sub.recv_multipart(), 5.0)
    assert topic == TOPIC.encode()
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(batch, type=MapBatch)


async def replayed(again: zmq.asyncio.Socket, start: int) -> list[tuple[int, MapBatch]]:
    await again.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    async with asyncio.timeout(10.0):
        while True:
            empty, number, batch = await again.recv_multipart()
            assert empty == b""
            if number == END:
                assert batch == b""
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch, type=MapBatch)))


def an_asker(context: Sockets, publisher: Publisher) -> zmq.asyncio.Socket:
    again = context.socket(zmq.DEALER)
    again.connect(publisher.replay_address)
    return again


async def test_each_call_is_told_at_once_as_what_the_whole_pool_gained_and_lost(
    context: Sockets,
) -> None:
    async with a_directory() as (directory, publisher, client):
        sub = await subscribed(context, publisher)
        await put(directory, 1, 2)
        first, batch = await heard(sub)
        assert batch.data_parallel_rank == 0
        assert batch.events == [BlockStored(names(1, 2), None, [1] * STEP + [2] * STEP, STEP, None, "CPU", None)]
        await put(directory, 1, 2, 3)
        stored = BlockStored(names(3), names(2)[0], [3] * STEP, STEP, None, "CPU", None)
        number, batch = await heard(sub)
        assert (number, batch.events) == (first + 1, [stored])
        other = a_place("other", 4, "b")
        await client.call(Announce(other), Announced, within_s=5.0)
        lease = await directory.acquire(an_ask(names(1, 2, 3), near="other", copies=2))
        assert len(lease.copies) == 1
        await directory.commit(lease.lease, [0], names(1))  # a second replica: to the outside nothing has changed
        assert (await directory.stats()).copies == 1
        await directory.release(lease.lease)
        held = await directory.acquire(an_ask(names(2)))
        await client.call(Goodbye(other.segment, other.incarnation), Done, within_s=5.0)
        assert await directory.clear() == 2
        number, batch = await heard(sub)
        assert (number, len(batch.events)) == (first + 2, 1)
        assert isinstance(batch.events[0], BlockRemoved)
        assert {*batch.events[0].block_hashes} == {*names(1, 3)}
        await directory.release(held.lease)
        assert await directory.clear() == 1
        assert (await heard(sub))[1].events == [AllBlocksCleared()]


async def test_a_late_joiner_gets_all_and_a_gap_is_seen_and_filled(context: Sockets) -> None:
    async with a_directory() as (directory, publisher, _):
        await put(directory, 1)
        again = an_asker(context, publisher)
        batches = await replayed(again, 0)
        assert [number for number, _ in batches] == [0, 1]
        assert batches[0][1].events == [AllBlocksCleared()]
        assert batches[1][1].events[0].block_hashes == names(1)
        sub = await subscribed(context, publisher)
        last = publisher.events.number - 1
        sub.unsubscribe(TOPIC)
        await asyncio.sleep(0.2)
        await put(directory, 1, 2)
        await put(directory, 1, 2, 3)
        sub.subscribe(TOPIC)
        await asyncio.sleep(0.2)
        await put(directory, 1, 2, 3, 4)
        number, batch = await heard(sub)
        assert (number, batch.events[0].block_hashes) == (last + 3, names(4))
        missed = await replayed(again, last + 1)
        assert [b.events[0].block_hashes for _, b in missed] == [names(2), names(3), names(4)]
        assert await replayed(again, last + 4) == []


async def test_a_replay_longer_than_a_queue_arrives_whole(context: Sockets) -> None:
    async with a_directory() as (_, publisher, _):
        count = 5 * REPLAY_BATCHES_MAX
        for _ in range(count - publisher.events.number):
            publisher.events.cleared()
            publisher.publish()
        again = an_asker(context, publisher)
        assert [number for number, _ in await replayed(again, 0)] == list(range(count))
        assert publisher.abandoned == 0


async def test_garbage_is_dropped_and_counted_and_the_next_request_is_served(context: Sockets) -> None:
    async with a_directory() as (_, publisher, _):
        again = an_asker(context, publisher)
        eight = bytes(8)
        garbage = [[b""], [b"x"], [b"", b"short"], [b"", eight, b"more"], [b"no", eight], [b"", b"nine bytes"]]
        for frames in garbage:
            await again.send_multipart(frames)
        assert await replayed(again, 0) != []
        assert (publisher.bad_requests, publisher.replays) == (len(garbage), 1)


async def test_a_reader_that_takes_nothing_is_given_up_and_holds_up_nobody(context: Sockets) -> None:
    async with a_directory(slots=2000) as (directory, publisher, _):
        for start in range(0, 600):
            publisher.events.tell(
                row := names(*range(start * 100, start * 100 + 100)), token_ids(range(1600)), None
            )
            for name in row:
                publisher.events.stored(name)
            publisher.publish()
        deaf = context.socket(zmq.DEALER)
        deaf.set(zmq.RCVHWM, 1)
        deaf.set(zmq.RCVBUF, 4096)
        deaf.connect(publisher.replay_address)
        for _ in range(8):
            await deaf.send_multipart([b"", bytes(8)])
        await put(directory, 1)  # the directory answers meanwhile
        async with asyncio.timeout(15.0):
            while not publisher.abandoned:  # noqa: ASYNC110 - only the publisher can tell
                await asyncio.sleep(0.05)
        deaf.close(0)
        assert len(await replayed(an_asker(context, publisher), publisher.events.number - 1)) == 1


async def test_a_slow_subscriber_loses_batches_and_holds_up_nobody(
    context: Sockets,
) -> None:
    async with a_directory() as (directory, publisher, _):
        slow = context.socket(zmq.SUB)
        slow.set(zmq.RCVHWM, 1)
        slow.set(zmq.RCVBUF, 4096)
        slow.subscribe(TOPIC)
        slow.connect(publisher.address)
        await asyncio.sleep(0.3)
        large = names(*range(1000))
        for _ in range(3000):
            for name in large[:100]:
                publisher.events.stored(name)
            publisher.publish()
        await asyncio.wait_for(put(directory, 1), 2.0)
        numbers = []
        while await slow.poll(200):
            numbers.append((await heard(slow))[0])
        assert len(numbers) < publisher.events.number - 1  # lost some, and the numbers say so
        assert publisher.failed == 0


async def joined(publisher: Publisher, listeners: int, refused: int = 0) -> None:
    """Until so many are connected, and at least so many were refused."""
    async with asyncio.timeout(10.0):
        while True:
            load = publisher.tell(Load())
            if load.listeners == listeners and load.listeners_refused >= refused:
                return
            await asyncio.sleep(0.01)


async def test_more_listeners_than_may_be_are_refused_until_one_leaves(context: Sockets) -> None:
    async with a_directory() as (directory, publisher, _):
        subs = [await subscribed(context, publisher) for _ in range(LISTENERS_MAX)]
        late = context.socket(zmq.SUB)
        late.subscribe(TOPIC)
        late.connect(publisher.address)
        await joined(publisher, LISTENERS_MAX, refused=2)  # it tries again by itself
        await put(directory, 1)
        assert [await heard(sub) for sub in subs]
        assert not await late.poll(50)
        subs[3].close(0)
        async with asyncio.timeout(10.0):
            while not await late.poll(20):
                publisher.events.cleared()
                publisher.publish()
        await joined(publisher, LISTENERS_MAX)
        askers = [an_asker(context, publisher) for _ in range(LISTENERS_MAX + 1)]
        await joined(publisher, 2 * LISTENERS_MAX)
        served = [asyncio.create_task(replayed(asker, 0)) for asker in askers]
        await asyncio.wait(served, return_when=asyncio.FIRST_COMPLETED)
        for asker in askers[:-1]:
            asker.close(0)
        await asyncio.gather(*served, return_exceptions=True)
        await joined(publisher, LISTENERS_MAX + 1)


async def test_who_subscribes_to_more_than_it_may_is_sent_away_alone(context: Sockets) -> None:
    async with a_directory() as (directory, publisher, _):
        good = await subscribed(context, publisher)
        for topic in range(TOPICS_MAX - 2):
            good.subscribe(f"other {topic}")
        greedy = context.socket(zmq.SUB)
        for topic in range(TOPICS_MAX + 1):
            greedy.subscribe(f"{TOPIC} {topic}")
        greedy.connect(publisher.address)
        async with asyncio.timeout(10.0):
            while publisher.tell(Load()).listeners_refused < 3:
                await greedy.poll(10)  # it tries again while it listens
        greedy.close(0)
        await joined(publisher, 1)
        await put(directory, 1)
        assert (await heard(good))[1].events[0].block_hashes == names(1)
        for _ in range(5):  # a topic that is given up does not count
            good.unsubscribe("other 0")
            good.subscribe("other 0")
        await asyncio.sleep(0.3)
        await put(directory, 1, 2)
        assert (await heard(good))[1].events[0].block_hashes == names(2)
        await joined(publisher, 1)


async def test_a_frame_that_is_too_long_and_a_silent_connection_end_soon(context: Sockets) -> None:
    async with a_directory() as (_, publisher, _):
        port = int(publisher.address.rpartition(":")[2])
        silent = socket.create_connection(("127.0.0.1", port))
        await joined(publisher, 1)
        long = context.socket(zmq.SUB)
        long.subscribe("x" * REQUEST_BYTES_MAX)
        long.setsockopt(zmq.RECONNECT_IVL, -1)
        long.connect(publisher.address)
        await joined(publisher, 0)
        silent.close()


def test_a_descriptor_of_another_file_is_left_alone(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    server = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(server.getsockname())
    near, _ = server.accept()
    with one, other, server, far, near, (tmp_path / "file").open("w") as file:
        for descriptor in (one.fileno(), file.fileno(), near.fileno(), 10**6):
            end_connection(descriptor, "tcp://127.0.0.1:1")
        file.write("still there")
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        near.sendall(b"y")
        assert far.recv(1) == b"y"
        end_connection(near.fileno(), f"tcp://127.0.0.1:{server.getsockname()[1]}")
        assert far.recv(1) == b""


async def test_what_the_publisher_counts_is_in_the_directorys_load(context: Sockets) -> None:
    async with a_directory() as (directory, publisher, _):
        sub = await subscribed(context, publisher)
        await put(directory, 1)
        await heard(sub)
        await replayed(an_asker(context, publisher), 0)
        load = DirectoryService(Index(), publisher).load()
        assert (load.events, load.events_failed) == (publisher.events.number, 0)
        assert (load.replays, load.replays_abandoned, load.listeners, load.listeners_refused) == (1, 0, 2, 0)


async def test_tokens_and_parents_that_cannot_be_are_refused_and_change_nothing(
    context: Sockets,
) -> None:
    async with a_directory() as (directory, publisher, client):
        lease = await directory.acquire(an_ask(names(1)))
        good = Commit(lease.lease, [0], names(1), token_ids(range(STEP)))
        number = publisher.events.number
        for bad in (replace(good, tokens=token_ids([1])), replace(good, parent=BlockHash(b"short"))):
            with pytest.raises(RemoteError, match="BadMessage"):
                await client.call(bad, Done, within_s=5.0)
        assert (await directory.lookup(names(1))).reach == 0
        assert publisher.events.number == number
        await client.call(good, Done, within_s=5.0)
        assert publisher.events.number == number + 1


def a_free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{one.getsockname()[1]}"


async def test_the_listener_of_the_document_joins_late_and_follows_a_restart(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "listener.py").write_text(program, encoding="utf-8")
    addresses = a_free_port(), a_free_port()
    process: asyncio.subprocess.Process | None = None

    async def until(count: int) -> None:
        assert process is not None
        assert process.stdout is not None
        async with asyncio.timeout(10.0):
            while int(await process.stdout.readline()) != count:
                pass

    try:
        async with a_directory("one", *addresses) as (directory, _, _):
            await put(directory, 1, 2, 3)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(tmp_path / "listener.py"), *addresses), stdout=asyncio.subprocess.PIPE
            )
            await until(3)
            await put(directory, 1, 2, 3, 4)
            await until(4)
        async with a_directory("two", *addresses) as (directory, _, _):
            await until(0)
            await put(directory, 7)
            await until(1)
    finally:
        if process is not None:
            process.kill()
            await process.communicate()


def test_a_taken_address_is_an_error_and_leaves_no_socket() -> None:
    first = Publisher(Events(Incarnation("a"), STEP), TOPIC, ANY, ANY)
    for addresses in ((first.address, ""), (ANY, first.replay_address)):
        with pytest.raises(OSError, match="cannot publish KV events at"):
            Publisher(Events(Incarnation("b"), STEP), TOPIC, *addresses)
    first.close()


def test_events_are_off_by_default_and_a_replay_needs_them() -> None:
    assert KVCacheConfig().events == ""
    with pytest.raises(ValueError, match="events_replay"):
        KVCacheConfig(events_replay=ANY)
