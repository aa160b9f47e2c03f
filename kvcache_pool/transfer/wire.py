"""What is on a stream between a reader or writer and a segment: plain structs, then runs from where they lie.

    opening    MAGIC, token                                          once; a wrong one closes the connection
    ask        ASK: write?, layers, count │ count x (slot, generation) │ if writing: checksums, then runs
    answer     ANSWER: status, valid, text                           │ if reading: checksums, then `valid` units

Numbers are little endian; a checksum is 8 bytes, one for each run. A read's answer has room for the checksums of
all `count` units, so that whoever asks can receive all of it into its final places with one call. One ask is under
way on a connection at a time. Steps are generators: they yield what the socket must become, and whoever runs them
waits, in the event loop or in a thread.
"""

import socket
import struct
from collections.abc import Generator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from kvcache_pool.transfer.copiers import HOP_BYTES, HOP_RUNS
from kvcache_pool.transfer.copies import Span
from protocol.errors import BadMessage, PeerLost

MAGIC = b"dango kv runs 01"
TOKEN_BYTES = 16
OPENING_BYTES = len(MAGIC) + TOKEN_BYTES

ASK = struct.Struct("<?3xIII")
GRANT = struct.Struct("<QQ")
ANSWER = struct.Struct("<B3xI120s")
CHECKSUM_BYTES = 8

GENERATIONS_MAX = 1 << 62
"""What no directory reaches before the year 2116. A segment refuses a wild one: it would go into its table, from
there into the next directory's count, and no lower one would ever be accepted again."""

BUFFERS_MAX = 1024
"""Of one system call, says Linux."""


class Status(IntEnum):
    """How an ask ended."""

    GOOD = 0
    STALE = 1
    CORRUPT = 2
    REFUSED = 3
    """It is no ask, or not for this segment; the connection ends."""


class Wait(IntEnum):
    """What a socket must become before a step can go on."""

    READABLE = 1
    WRITABLE = 2


class Ask(NamedTuple):
    """The head of an ask."""

    write: bool
    span: Span
    units: int

    def pack(self) -> bytes:
        return ASK.pack(self.write, self.span.first, self.span.width, self.units)

    @staticmethod
    def unpack(data: bytes | bytearray, layers: int, run_bytes: int) -> "Ask":
        """Raises BadMessage for layers that are not there, and for more than one hop."""
        write, first, width, count = ASK.unpack(data)
        if not 1 <= width <= layers or first > layers - width:
            raise BadMessage(f"there are {layers} layers, not {width} from {first}")
        if not 1 <= count <= max(1, min(HOP_RUNS // width, HOP_BYTES // (width * run_bytes))):
            raise BadMessage(f"{count} slots of {width} layers in one ask")
        return Ask(write, Span(first, width), count)


class Answer(NamedTuple):
    """The head of an answer."""

    status: Status
    valid: int = 0
    """Of a read: how many leading units had the right generation."""
    text: str = ""

    def pack(self) -> bytes:
        return ANSWER.pack(self.status, self.valid, self.text.encode()[:120])

    @staticmethod
    def unpack(data: bytes | bytearray, count: int) -> "Answer":
        """To an ask for `count` units. Raises BadMessage."""
        status, valid, text = ANSWER.unpack(data)
        if status > max(Status) or valid > count:
            raise BadMessage(f"an answer of status {status} with {valid} of {count} units")
        return Answer(Status(status), valid, text.rstrip(b"\0").decode(errors="replace"))


Steps = Generator[Wait, None, Any]


def send(sock: socket.socket, views: Sequence[memoryview | bytes], flags: int) -> Steps:
    """Send all of `views`. Raises PeerLost."""
    left = [memoryview(view) for view in views]
    while left:
        try:
            sent = sock.sendmsg(left[:BUFFERS_MAX], [], flags)
        except BlockingIOError:
            yield Wait.WRITABLE
            continue
        except OSError as error:
            raise PeerLost(f"a stream broke: {error}") from error
        left = past(left, sent)


def receive(
    sock: socket.socket, views: Sequence[memoryview], flags: int, least: int | None = None
) -> Generator[Wait, None, int]:
    """Fill all of `views`, or at least `least` bytes of them. Returns how many came. Raises PeerLost."""
    left, came = list(views), 0
    wanted = sum(view.nbytes for view in left) if least is None else least
    while came < wanted:
        try:
            got = sock.recvmsg_into(left[:BUFFERS_MAX], 0, flags)[0]
        except BlockingIOError:
            yield Wait.READABLE
            continue
        except OSError as error:
            raise PeerLost(f"a stream broke: {error}") from error
        if got == 0:
            raise PeerLost("a stream ended")
        came, left = came + got, past(left, got)
    return came


def past(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` after their first `count` bytes."""
    for number, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[number + 1 :]] if count else list(views[number:])
        count -= view.nbytes
    return []


def first(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of `views`."""
    kept: list[memoryview] = []
    for view in views:
        if count <= 0:
            break
        kept.append(view[:count])
        count -= kept[-1].nbytes
    return kept
