"""Frames: one header in msgpack, then raw buffers. What a ZeroMQ multipart message holds between any two of us.

    frame 0   [version, kind, call, amount | nil, tag, fields]            small
    frame 1.. raw bytes, never copied into the header                     KV, mostly

`call` is the client's number for a conversation; every answer repeats it. `amount` is of a CALL the seconds left,
of an ITEM or REPLY how many answers to this call came before it. Deadlines travel as seconds left, since clocks
differ between hosts.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from protocol.cluster import PROTOCOL_VERSION
from protocol.errors import BadMessage
from protocol.message import Message, build, pack, unpack_plain

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a header is for. The first three go to the server, the others come back."""

    CALL = 1
    """Run this; answer with REPLY, or any number of ITEMs and a REPLY, or ERROR."""
    CANCEL = 2
    """The caller has lost interest: stop. No answer."""
    ALIVE = 3
    """The caller lives and still waits for its open calls. No answer."""
    REPLY = 4
    """The last answer of a call."""
    ITEM = 5
    """One item of a stream."""
    ERROR = 6
    """The call failed: tag is the error's kind, fields its text."""


KINDS = {int(kind): kind for kind in Kind}

HEADER_FIELDS = 6
AMOUNTS = (int, float, type(None))
"""Types of an amount."""


class Header(NamedTuple):
    """A header, taken apart. `fields` is a map for a message and text for an error."""

    kind: Kind
    call: int
    amount: float | None
    """Of a CALL: seconds left, None for as long as the server allows. Of an ITEM or REPLY: answers before it."""
    tag: str
    fields: Any

    def message(self) -> Message:
        """The message in this header. Raises BadMessage."""
        message_kind = Message.tags.get(self.tag)
        if message_kind is None:
            raise BadMessage(f"unknown message {self.tag[:64]!r}")
        return build(message_kind, self.fields)


def encode(kind: Kind, call: int, message: Message | None = None, amount: float | None = None) -> bytes:
    """A header that carries `message`, or none."""
    tag = type(message).__name__ if message is not None else ""
    return pack([PROTOCOL_VERSION, kind.value, call, amount, tag, message])


def encode_error(call: int, error_kind: str, text: str) -> bytes:
    """A header that says that a call failed."""
    return pack([PROTOCOL_VERSION, Kind.ERROR.value, call, None, error_kind, text])


def decode(frames: Sequence[Buffer]) -> tuple[Header, list[memoryview]]:
    """A header and the buffers after it. Raises BadMessage on anything else."""
    if not frames:
        raise BadMessage("no frames")
    header = unpack_plain(frames[0])
    if type(header) is not list or len(header) != HEADER_FIELDS:
        raise BadMessage("a header of another shape")
    version, kind, call, amount, tag, fields = header
    if (type(version), type(kind), type(call), type(tag)) != (int, int, int, str) or type(amount) not in AMOUNTS:
        raise BadMessage("a header of another shape")
    if version != PROTOCOL_VERSION:
        raise BadMessage(f"protocol version {version}, not {PROTOCOL_VERSION}")
    if kind not in KINDS:
        raise BadMessage(f"unknown kind of frame {kind}")
    if amount is not None and not math.isfinite(amount):
        raise BadMessage(f"an amount of {amount}")  # NaN would upset the order of the loop's timers
    return Header(KINDS[kind], call, amount, tag, fields), [memoryview(frame) for frame in frames[1:]]
