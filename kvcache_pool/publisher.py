"""The sockets of KV events, as vLLM has them: PUB for who listens, ROUTER for who missed some.

    PUB      topic | number, 8 bytes big-endian | batch
    ROUTER   asked for a number, in 8 bytes: number | batch, for all that are kept from there on, then -1 | nothing

A slow listener cannot hold up the directory: to publish is one call that never waits, a subscriber
that is too slow loses batches and sees it by their numbers, and a replay waits a moment for its reader and is then
given up. Many listeners, or bad ones, cost a bounded amount of memory: connections and what each subscribes to are
counted (`kvcache_pool/door.py`), and what waits for each is bounded. The PUB is an XPUB, which differs in that it
tells of subscriptions.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import zmq
import zmq.asyncio

from kvcache_pool.door import Door
from kvcache_pool.events import Events
from protocol.call import Answer
from protocol.message import Message
from protocol.registry import Load
from protocol.rpc import Ask, Handler
from protocol.tasks import together

LISTENERS_MAX = 32
"""Connected to either socket: indexers and routers are few. Who comes later is refused until one leaves."""

SUBSCRIBER_BATCHES_MAX = 256
"""That wait for one subscriber (ZeroMQ's high-water mark), 115 KB each at most and some KB as a rule. What it
loses beyond, it may ask for again, since forty times as many are kept."""

NOTICES_MAX = 1024
"""Of subscriptions, that are read in one go: others get their turn."""

REPLAY_BATCHES_MAX = 32
"""That wait for one reader of a replay; the rest follows as it reads."""

REQUESTS_MAX = 8
"""Replays that one peer may have asked for and not been given: nobody needs more than one."""

REQUEST_BYTES_MAX = 512
"""A longer frame from a peer (a number, a topic to subscribe to, or what ZeroMQ says of itself) closes its
connection unread."""

WATCH_EVERY_S = 0.1
"""How long one listener too many is there at most, if nothing is published meanwhile."""

REPLAY_STALL_S = 1.0
"""A reader that takes nothing for so long is given up: others wait behind it."""

REPLAY_RETRY_S = 0.005
"""How soon a full queue is tried again."""

REPLAY_RUN = 64
"""Batches of a replay that are sent before others get their turn: a millisecond."""

NUMBER_BYTES = 8
CHANGES = {b"\1": 1, b"\0": -1}
"""How an XPUB says that somebody subscribes, or does no more."""

END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The number that ends a replay."""

log = logging.getLogger("dango.kvcache")


class Publisher:
    """Two sockets and a context of their own. `serve` must run for replays and bounds; `close` at the end."""

    def __init__(self, events: Events, topic: str, address: str, replay: str = "") -> None:
        """Listens at `address`, and at `replay` unless that is empty; publishes what is pending. Raises
        OSError."""
        self.events = events
        self.failed = 0
        """Batches that could not be sent to anybody."""
        self.replays = 0
        self.bad_requests = 0
        """Requests for a replay that were none, and were dropped."""
        self.abandoned = 0
        """Replays whose reader was gone or too slow."""
        self._topic = topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._door = Door(self._context, self._pub, LISTENERS_MAX)
        self._doors = [self._door]
        self._router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER) if replay else None
        if self._router is not None:
            self._doors.append(Door(self._context, zmq.Socket.shadow(self._router.underlying), LISTENERS_MAX))
        try:
            self._pub.setsockopt(zmq.RCVHWM, REQUESTS_MAX)
            self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)  # tells of each subscription, not of the first to a topic
            self._pub.setsockopt(zmq.SNDHWM, SUBSCRIBER_BATCHES_MAX)
            self.address = _bind(self._pub, address)
            self.replay_address = "" if self._router is None else self._listen(self._router, replay)
        except OSError:
            self.close()
            raise
        self.publish()

    @staticmethod
    def _listen(router: zmq.asyncio.Socket, replay: str) -> str:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells of a full queue, and of a peer that is gone
        router.setsockopt(zmq.SNDHWM, REPLAY_BATCHES_MAX)
        router.setsockopt(zmq.RCVHWM, REQUESTS_MAX)
        return _bind(router, replay)

    def publish(self) -> None:
        """Send what is pending, if anything is. Never waits and never raises."""
        self._watch()
        if not self.events.pending:
            return
        for number, batch in self.events.flush(datetime.now(UTC).timestamp()):
            try:
                self._pub.send_multipart((self._topic, number.to_bytes(NUMBER_BYTES, "big"), batch), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self.failed += 1
                log.warning("batch %d of KV events was not sent: %s", number, error)

    def tell(self, load: Load) -> Load:
        """The same with what is known here."""
        self._watch()
        return replace(
            load,
            events=self.events.number - self.failed,
            events_failed=self.failed,
            replays=self.replays,
            replays_abandoned=self.abandoned,
            listeners=sum(map(len, self._doors)),
            listeners_refused=sum(door.refused for door in self._doors),
        )

    def _watch(self) -> None:
        """See who came, and to how much they subscribe. Never waits."""
        for door in self._doors:
            door.watch()
        for _ in range(NOTICES_MAX):
            try:
                said = self._pub.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            with contextlib.suppress(zmq.ZMQError):  # what the end of a connection took back names none
                self._door.subscribed(int(said.get(zmq.SRCFD)), CHANGES.get(said.bytes[:1], 0))

    def after(self, row: Handler) -> Handler:
        """The same, and then publish; also when it has failed, since what it had changed before is changed."""

        async def run(message: Message, ask: Ask) -> Message | Answer:
            try:
                return await row.run(message, ask)
            finally:
                self.publish()

        return row._replace(run=run)

    async def serve(self) -> None:
        """Watch who connects, and replay to who asks, until cancelled."""
        await together([self._watch_forever(), self._serve_replays()])

    async def _watch_forever(self) -> None:
        while True:
            self._watch()
            await asyncio.sleep(WATCH_EVERY_S)

    async def _serve_replays(self) -> None:
        """One at a time; returns at once where nobody can ask."""
        while self._router is not None:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
                self.bad_requests += 1
                log.debug("dropped %d frames that ask for no replay", len(frames))
                continue
            self.replays += 1
            try:
                await self._replay(self._router, frames[0], int.from_bytes(frames[2], "big"))
            except zmq.ZMQError as error:
                self.abandoned += 1
                log.info("a replay of KV events was given up: %s", error)

    async def _replay(self, router: zmq.asyncio.Socket, peer: bytes, start: int) -> None:
        """Raises ZMQError when the peer is gone, or does not read."""
        for sent, (number, batch) in enumerate(self.events.since(start)):
            await _send(router, (peer, b"", number.to_bytes(NUMBER_BYTES, "big"), batch))
            if sent % REPLAY_RUN == REPLAY_RUN - 1:
                await asyncio.sleep(0)
        await _send(router, (peer, b"", END, b""))

    def close(self) -> None:
        """Drops what waits for subscribers."""
        for door in self._doors:
            door.close()
        self._pub.close(0)
        if self._router is not None:
            self._router.close(0)
        self._context.term()


def _bind(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", address: str) -> str:
    """Where it listens. Raises OSError."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot publish KV events at {address}: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


async def _send(router: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    """Raises ZMQError when the peer is gone, or has taken nothing for REPLAY_STALL_S."""
    clock = asyncio.get_running_loop().time
    end = clock() + REPLAY_STALL_S
    while True:
        try:
            await router.send_multipart(frames, flags=zmq.NOBLOCK)
            return
        except zmq.Again:
            if clock() > end:
                raise
        await asyncio.sleep(REPLAY_RETRY_S)
