"""The segment's end of streams: a thread for each connection, between the socket and the segment's memory.

Why threads: a thread that waits in a read is awake one wake-up after the ask came, and what it then does, copying
between memory and the kernel, needs no interpreter. The event loop beside them goes on.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from kvcache_pool.aligned import aligned
from kvcache_pool.api import TRANSFER_S_MAX, Corrupt, Grant, OpenStream, Stale, StreamPort
from kvcache_pool.segment import Memory
from kvcache_pool.transfer.copies import Copies
from kvcache_pool.transfer.stream import set_silence
from kvcache_pool.transfer.wire import (
    ASK,
    CHECKSUM_BYTES,
    GENERATIONS_MAX,
    GRANT,
    MAGIC,
    OPENING_BYTES,
    TOKEN_BYTES,
    Answer,
    Ask,
    Status,
    Steps,
    receive,
    send,
)
from protocol.blocks import BlockLayout
from protocol.errors import BadMessage, PeerLost
from protocol.ids import SegmentId

CONNECTIONS_MAX = 256
"""Of one segment: each has a thread. A hundred instances have two each. Who comes later goes over the service."""

CLOSE_S = 5.0
"""For threads to end, once their sockets are shut: they are in the middle of a hop at most."""

OPENING_S = 2.0
"""For the next bytes of an opening: whoever does not know the token does not keep a thread for long."""

ACCEPT_AGAIN_S = 0.1
"""After a connection could not be taken."""

log = logging.getLogger("dango.kvcache")


class Streams:
    """Takes connections at one port. Owns it, and a thread for each connection, until `close`."""

    def __init__(self, memory: Memory, host: str) -> None:
        self._copies = Copies(memory)
        self._layout = memory.geometry.layout
        self._host = host
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False

    @property
    def connections(self) -> list[socket.socket]:
        """Those that are open now."""
        with self._lock:
            return list(self._open)

    def port(self) -> StreamPort:
        """Where connections are taken, from the first call on. Raises OSError."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._listener = socket.create_server((self._host, 0), family=family)
            threading.Thread(
                target=self._accept, args=(self._listener,), name="dango-streams", daemon=True
            ).start()
        return StreamPort(self._listener.getsockname()[1], self._token)

    def tell(self, _message: OpenStream) -> StreamPort:
        """For the service. Raises BadMessage where no port can be had."""
        try:
            return self.port()
        except OSError as error:
            raise BadMessage(f"streams cannot be taken here: {error}") from error

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a stream could not be taken: %s", error)  # no descriptors, say: it may pass
                time.sleep(ACCEPT_AGAIN_S)
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            with self._lock:
                if self._closed or len(self._open) >= CONNECTIONS_MAX:
                    sock.close()
                    continue
                self._open[sock] = thread
                try:
                    thread.start()
                except RuntimeError as error:  # no thread can be had
                    log.warning("a stream could not be taken: %s", error)
                    del self._open[sock]
                    sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(TRANSFER_S_MAX))
            set_silence(sock, OPENING_S)
            opening = bytearray(OPENING_BYTES)
            _to_end(receive(sock, [memoryview(opening)], socket.MSG_WAITALL))
            if hmac.compare_digest(opening, MAGIC + self._token):
                set_silence(sock, TRANSFER_S_MAX)
                _Connection(sock, self._copies, self._layout).serve()
        except (PeerLost, OSError) as error:
            log.debug("%s", error)
        except Exception:
            log.exception("a stream failed")
        finally:
            with self._lock:
                del self._open[sock]
            sock.close()

    def close(self) -> None:
        """Close the port and all connections, and wait for their threads. Twice is no error."""
        with self._lock:
            self._closed = True
            left = dict(self._open)
            for sock in left:
                with contextlib.suppress(OSError):  # the other side was faster
                    sock.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in left.values():
            thread.join(CLOSE_S)


class _Connection:
    """One connection, in its own thread."""

    def __init__(self, sock: socket.socket, copies: Copies, layout: BlockLayout) -> None:
        self._sock = sock
        self._copies = copies
        self._layout = layout
        self._came = aligned(0)
        """What is written lands here first: it goes to its slots when its checksums are right."""

    def serve(self) -> None:
        """Until the other side ends it. Raises PeerLost."""
        head = bytearray(ASK.size)
        while _first_of(self._sock, head):
            try:
                ask = Ask.unpack(head, self._layout.layers, self._layout.run_bytes)
            except BadMessage as error:
                self._refuse(str(error))
                return
            table = bytearray(GRANT.size * ask.units)
            _to_end(receive(self._sock, [memoryview(table)], socket.MSG_WAITALL))
            grants = [Grant(NOWHERE, slot, generation) for slot, generation in GRANT.iter_unpack(table)]
            if max(grant.generation for grant in grants) >= GENERATIONS_MAX:
                self._refuse(f"a generation is below {GENERATIONS_MAX}")
                return
            (self._write if ask.write else self._read)(ask, grants)

    def _refuse(self, text: str) -> None:
        _to_end(send(self._sock, [Answer(Status.REFUSED, text=text).pack()], 0))

    def _read(self, ask: Ask, grants: Sequence[Grant]) -> None:
        good = grants[: self._copies.require(grants)]
        runs = ask.units * ask.span.width
        noted = self._copies.checksums(ask.span, good)
        noted += [0] * (runs - len(noted))
        head = Answer(Status.GOOD, len(good)).pack() + struct.pack(f"<{runs}Q", *noted)
        _to_end(send(self._sock, [head, *self._copies.views(ask.span, good)], 0))

    def _write(self, ask: Ask, grants: Sequence[Grant]) -> None:
        shape = (ask.units, ask.span.width, self._layout.run_bytes)
        noted, size = bytearray(CHECKSUM_BYTES * shape[0] * shape[1]), shape[0] * shape[1] * shape[2]
        if self._came.size < size:
            self._came = aligned(size)
        came = self._came[:size]
        _to_end(receive(self._sock, [memoryview(noted), came.data], socket.MSG_WAITALL))
        answer = Answer(Status.GOOD, ask.units)
        try:
            expected = memoryview(noted).cast("Q").tolist()
            self._copies.put_verified(ask.span, grants, came.reshape(shape), expected)
        except Stale as error:
            answer = Answer(Status.STALE, text=str(error))
        except Corrupt as error:
            answer = Answer(Status.CORRUPT, text=str(error))
        _to_end(send(self._sock, [answer.pack()], 0))


NOWHERE = SegmentId("")
"""A segment's own name does not travel on its own streams."""


def _first_of(sock: socket.socket, head: bytearray) -> bool:
    """Wait for an ask, however long that takes. False when the other side has closed the connection."""
    view = memoryview(head)
    while True:
        try:
            got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # nobody has asked for a while
        except OSError as error:
            raise PeerLost(f"a stream broke: {error}") from error
        if got < len(head):
            if got:
                _to_end(receive(sock, [view[got:]], socket.MSG_WAITALL))
                return True
            return False
        return True


def _to_end(steps: Steps) -> None:
    """Run steps on a socket that blocks: one that yields has waited for TRANSFER_S_MAX. Raises PeerLost."""
    for _ in steps:
        raise PeerLost(f"a stream was silent for {TRANSFER_S_MAX} s")
