"""The network in production: ZeroMQ, DEALER to ROUTER, over TCP or unix sockets."""

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from protocol.errors import BadAddress, PeerLost
from protocol.frames import Buffer
from protocol.message import MESSAGE_BYTES_MAX

QUEUE_FRAMES_MAX = 4096
"""Of a socket, each way (ZeroMQ's high-water mark). A full queue makes a client wait, not the memory grow; a
server, which others wait for too, drops answers that nobody reads."""

FRAME_BYTES_MAX = max(MESSAGE_BYTES_MAX, 64 << 20)
"""A longer frame closes the connection unread. One run of a large model's layer is a few MiB."""

COPY_BELOW_BYTES = 64 << 10
"""Below this, ZeroMQ's own copy is cheaper than tracking a buffer until it has been sent."""

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
"""A peer whose machine vanished (no FIN, no RST) counts as lost after this; a busy one answers from
ZeroMQ's own thread."""


class ZmqLink:
    """A DEALER and its monitor: a broken connection becomes PeerLost at once, not a silence."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        _set_limits(self._socket)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue a call for a process that is not there
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._inbox: asyncio.Future[Any] | None = None
        self._breaks: asyncio.Future[Any] | None = None
        self._address = address
        try:
            self._socket.connect(address)
        except (zmq.ZMQError, UnicodeError) as error:
            self.close()
            raise BadAddress(f"{address[:80]!r} is no address to connect to") from error

    async def send(self, frames: Sequence[Buffer]) -> None:
        try:
            await self._socket.send_multipart(frames, copy=_copy(frames))
        except zmq.ZMQError as error:
            if not self._socket.closed:
                raise
            raise PeerLost(f"the connection to {self._address} was closed") from error
        except asyncio.CancelledError:
            # ZeroMQ cancels what still waits in a socket that is closed. Nobody cancelled the caller, and a task
            # that ends as if somebody had would pass for one whose work is not wanted.
            task = asyncio.current_task()
            if self._socket.closed and task is not None and not task.cancelling():
                raise PeerLost(f"the connection to {self._address} was closed") from None
            raise

    async def receive(self) -> list[memoryview]:
        self._inbox = self._inbox or asyncio.ensure_future(self._socket.recv_multipart(copy=False))
        self._breaks = self._breaks or asyncio.ensure_future(recv_monitor_message(self._monitor))
        await asyncio.wait((self._inbox, self._breaks), return_when=asyncio.FIRST_COMPLETED)
        if self._inbox.done():  # what arrived before the break is still worth having
            frames, self._inbox = self._inbox.result(), None
            return [frame.buffer for frame in frames]
        self._breaks.result()
        self._breaks = None
        raise PeerLost(f"the connection to {self._address} broke")

    def close(self) -> None:
        for task in (self._inbox, self._breaks):
            if task is not None:
                task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


class ZmqPort:
    """A ROUTER. Peers are known by the identity that ZeroMQ gives each connection."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        _set_limits(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise OSError(error.errno, f"cannot listen at {address}: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def send(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        try:
            await self._socket.send_multipart([peer, *frames], copy=_copy(frames))
        except zmq.Again as error:  # of one peer alone: to wait for it would be to let all the others wait
            raise PeerLost(f"the caller reads nothing: {QUEUE_FRAMES_MAX} answers wait for it") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLost("the caller is gone") from error

    async def receive(self) -> tuple[bytes, list[memoryview]]:
        peer, *frames = await self._socket.recv_multipart(copy=False)
        return bytes(peer.buffer), [frame.buffer for frame in frames]

    def close(self) -> None:
        self._socket.close(0)


class ZmqTransport:
    """Links and ports of one process. `close` after all of them are closed."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    def connect(self, address: str) -> ZmqLink:
        return ZmqLink(self._context, address)

    def bind(self, address: str) -> ZmqPort:
        return ZmqPort(self._context, address)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _set_limits(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def _copy(frames: Sequence[Buffer]) -> bool:
    return sum(len(frame) for frame in frames) < COPY_BELOW_BYTES
