"""Over streams of its own: runs go from the segment's memory to the socket, and from the socket into pages.

A few connections, each with one ask under way: while one hop's runs are verified here the next one's are on the
wire. Short hops run in the event loop, since waking a thread takes longer than they do. Long ones run in threads
of this route: a slow host never holds the threads that copy memory here.

Where the port cannot be reached (a firewall lets only the service through), the service itself carries the runs.
What has come before a connection breaks is not asked for again: only hops that did not end go another way.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Generator, Sequence
from functools import partial
from typing import NamedTuple

from kvcache_pool.api import (
    DIRECTORY_S,
    TRANSFER_S_MAX,
    Corrupt,
    Grant,
    OpenStream,
    Place,
    Priority,
    Stale,
    StreamPort,
)
from kvcache_pool.transfer.copiers import INLINE_BYTES, Copiers, Got, Turns, hops, leading, together
from kvcache_pool.transfer.copies import Span, Units, digests, same, unit_views
from kvcache_pool.transfer.tcp import TcpRoute
from kvcache_pool.transfer.wire import (
    ANSWER,
    CHECKSUM_BYTES,
    GRANT,
    MAGIC,
    Answer,
    Ask,
    Status,
    Wait,
    first,
    past,
    receive,
    send,
)
from protocol.errors import BadMessage, DangoError, PeerLost, RemoteError

CONNECTIONS = 2
"""To one segment: more would only let what is less urgent go before what is more."""

SHORT_BYTES = INLINE_BYTES
"""A hop that is no longer runs in the event loop: a thread would take two wake-ups more."""

OPEN_S = 2.0
"""To connect on a network where the service has just answered."""

AGAIN_S = 30.0
"""How long the service carries runs before a port that could not be reached is tried again."""

TRIES = 2
"""Of one hop: a connection may have been closed since it was last used. A hop can be done twice: a grant's holder
alone writes its slot, and with the same bytes."""

log = logging.getLogger("dango.transfer")

Exchange = Generator[Wait, None, int]


class StreamRoute:
    """The way to one segment on another host. Owns its connections, its threads, and the way over the service."""

    def __init__(self, place: Place, service: TcpRoute) -> None:
        self._place = place
        self._service = service
        self._threads = Copiers()
        self._turns = Turns(CONNECTIONS)
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._closed = False
        self._port: StreamPort | None = None
        self._closed_until = 0.0
        self._opening = asyncio.Lock()
        self._run_bytes = place.layout.run_bytes

    async def read(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> Got:
        """How many leading units are good. Raises PeerLost and its like if none is."""
        if await self._find_port() is None:
            return await self._service.read(span, grants, units, rows, priority)
        cut = hops(len(grants), span.width * self._run_bytes, span.width)
        counts, fault = await self._each(
            [Hop(False, span, grants[part], units, rows[part]) for part in cut], priority
        )
        good = leading(cut, counts)
        if fault is not None and not good:
            raise fault
        return Got(good, fault)

    async def write(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None:
        """Raises Stale, Corrupt, PeerLost and its like."""
        if await self._find_port() is None:
            await self._service.write(span, grants, units, rows, priority)
            return
        cut = hops(len(grants), span.width * self._run_bytes, span.width)
        parts = [Hop(True, span, grants[part], units, rows[part]) for part in cut]
        _, fault = await self._each(parts, priority)
        if fault is not None:
            raise fault

    async def _each(self, parts: Sequence["Hop"], priority: Priority) -> tuple[list[int], DangoError | None]:
        """How many units of each hop are good, and the first fault: after one, no other hop is begun."""
        faults: list[DangoError] = []

        async def one(hop: Hop) -> int:
            async with self._turns.turn(priority):
                try:
                    return 0 if faults else await self._do(hop, priority)
                except DangoError as error:
                    faults.append(error)
                    return 0

        counts = await together([one(hop) for hop in parts])
        return counts, faults[0] if faults else None

    async def _do(self, hop: "Hop", priority: Priority) -> int:
        """One ask and its answer; once more on a new connection if the first breaks, and then, this hop alone, by
        the service. How many units are good."""
        for _ in range(TRIES):
            sock = await self._connection()
            if sock is None:
                break
            self._busy.add(sock)
            try:
                good = await self._exchange(sock, hop, priority)
            except PeerLost:
                sock.close()
                self._drop_idle()  # they are as old
            except (Stale, Corrupt):
                self._put_back(sock)  # the whole answer has come
                raise
            except BaseException:
                sock.close()  # half an answer may be under way
                raise
            else:
                self._put_back(sock)
                return good
            finally:
                self._busy.discard(sock)
        else:
            self._rest()  # new ones break too: the segment is gone, or has as many streams as it takes
        if self._closed:
            raise self._was_closed()
        if hop.write:
            await self._service.write(hop.span, hop.grants, hop.units, hop.rows, priority)
            return len(hop.grants)
        return (await self._service.read(hop.span, hop.grants, hop.units, hop.rows, priority)).good

    def _was_closed(self) -> PeerLost:
        return PeerLost(f"the way to segment {self._place.segment} was closed")

    def _rest(self) -> None:
        self._port = None
        self._closed_until = asyncio.get_running_loop().time() + AGAIN_S

    def _put_back(self, sock: socket.socket) -> None:
        if self._closed:
            sock.close()
        else:
            self._idle.append(sock)

    async def _exchange(self, sock: socket.socket, hop: "Hop", priority: Priority) -> int:
        if len(hop.grants) * hop.span.width * self._run_bytes <= SHORT_BYTES:
            return await _in_loop(sock, hop.steps(sock, socket.MSG_DONTWAIT))
        stop = partial(_shut, sock)
        return await self._threads.run(priority, lambda: _in_thread(hop.steps(sock, 0)), stop)

    async def _find_port(self) -> StreamPort | None:
        """Where streams are taken; None where none are. Raises PeerLost if the service is not there either."""
        if self._port is None and asyncio.get_running_loop().time() >= self._closed_until:
            async with self._opening:
                if self._port is None and asyncio.get_running_loop().time() >= self._closed_until:
                    await self._open()
        return self._port

    async def _open(self) -> None:
        try:
            self._port = await self._service.client.call(OpenStream(), StreamPort, within_s=DIRECTORY_S)
            self._idle.append(await self._connect(self._port))
        except (RemoteError, BadMessage, OSError, TimeoutError) as error:
            log.info("no stream to segment %s: %s; its service carries the runs", self._place.segment, error)
            self._rest()

    async def _connection(self) -> socket.socket | None:
        """One that nobody uses, or a new one; None where none can be had. Raises PeerLost when this is closed."""
        if self._closed:
            raise self._was_closed()
        if self._idle:
            return self._idle.pop()
        if self._port is None:
            return None  # another hop has found that out
        try:
            return await self._connect(self._port)
        except (OSError, TimeoutError) as error:
            log.info("segment %s takes no stream: %s", self._place.segment, error)
            self._port = None  # it may have moved: asked for anew by the next transfer
            return None

    async def _connect(self, port: StreamPort) -> socket.socket:
        host, loop = stream_host(self._place.address), asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(OPEN_S):
                await loop.sock_connect(sock, (host, port.port))
                await loop.sock_sendall(sock, MAGIC + port.token)
            sock.setblocking(True)
            set_silence(sock, TRANSFER_S_MAX)
        except BaseException:
            sock.close()
            raise
        return sock

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def aclose(self) -> None:
        """Close the connections: what is in flight ends in PeerLost."""
        self._closed = True
        self._drop_idle()
        for sock in self._busy:
            _shut(sock)
        await asyncio.to_thread(self._threads.close)
        await self._service.aclose()


def stream_host(address: str) -> str:
    """The host of a service's address, where its streams are taken too. A unix socket's is this one."""
    if not address.startswith("tcp://"):
        return "127.0.0.1"
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def set_silence(sock: socket.socket, seconds: float) -> None:
    """A blocking call that waits longer for the other side fails with BlockingIOError."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class Hop(NamedTuple):
    """What one ask moves."""

    write: bool
    span: Span
    grants: Sequence[Grant]
    units: Units
    rows: Sequence[int]

    def steps(self, sock: socket.socket, flags: int) -> Exchange:
        """Ask, and take the answer. Returns how many leading units are good."""
        return (self._write if self.write else self._read)(sock, flags)

    def _head(self) -> list[bytes]:
        ask = Ask(self.write, self.span, len(self.grants))
        return [ask.pack(), *(GRANT.pack(slot, generation) for _, slot, generation in self.grants)]

    def _read(self, sock: socket.socket, flags: int) -> Exchange:
        yield from send(sock, [b"".join(self._head())], flags)
        count, frames = len(self.grants), unit_views(self.units, self.rows)
        head, noted = bytearray(ANSWER.size), bytearray(CHECKSUM_BYTES * count * self.span.width)
        places = [memoryview(head), memoryview(noted), *frames]
        came = yield from receive(sock, places, flags, least=ANSWER.size)
        valid = _checked(head, count).valid
        size = len(head) + len(noted) + sum(frame.nbytes for frame in frames) // count * valid
        if came > size:
            raise BadMessage("an answer is longer than it says")
        yield from receive(sock, past(first(places, size), came), flags | socket.MSG_WAITALL)
        expected = memoryview(noted).cast("Q")[: valid * self.span.width].tolist()
        found = digests(self.grants[:valid], self.units, self.rows[:valid])
        return same(found, expected, self.span.width)

    def _write(self, sock: socket.socket, flags: int) -> Exchange:
        found = digests(self.grants, self.units, self.rows)
        head = b"".join((*self._head(), struct.pack(f"<{len(found)}Q", *found)))
        yield from send(sock, [head, *unit_views(self.units, self.rows)], flags)
        answer = bytearray(ANSWER.size)
        yield from receive(sock, [memoryview(answer)], flags)
        return _checked(answer, len(self.grants)).valid


def _checked(head: bytearray, count: int) -> Answer:
    """Raises what the segment says is wrong, or BadMessage."""
    answer = Answer.unpack(head, count)
    if answer.status is Status.STALE:
        raise Stale(answer.text)
    if answer.status is Status.CORRUPT:
        raise Corrupt(answer.text)
    if answer.status is Status.REFUSED:
        raise BadMessage(answer.text)
    return answer


def _in_thread(steps: Exchange) -> int:
    """Run steps whose socket blocks: it waits only past its limit of silence."""
    try:
        next(steps)
    except StopIteration as end:
        return int(end.value)
    raise PeerLost(f"a stream was silent for {TRANSFER_S_MAX} s")


async def _in_loop(sock: socket.socket, steps: Exchange) -> int:
    """Run steps whose socket does not block; the caller keeps the deadline."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            wait = next(steps)
        except StopIteration as end:
            return int(end.value)
        ready = loop.create_future()
        add, remove = (
            (loop.add_reader, loop.remove_reader)
            if wait is Wait.READABLE
            else (loop.add_writer, loop.remove_writer)
        )
        add(sock, _wake, ready)
        try:
            await ready
        finally:
            remove(sock)


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _shut(sock: socket.socket) -> None:
    """What a thread waits for on this socket ends now."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
