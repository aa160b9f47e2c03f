"""Frames: fixed bytes on the wire, and nothing else is taken for one."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.cluster import PROTOCOL_VERSION
from protocol.errors import BadMessage
from protocol.frames import KINDS, Kind, decode, encode, encode_error
from protocol.message import MESSAGE_BYTES_MAX, Message


class Poke(Message):
    number: int
    text: str = ""


GOOD = [PROTOCOL_VERSION, 1, 7, 2.5, "Poke", {"number": 3}]


def test_golden_bytes() -> None:
    """What an older process understands. They may change only together with PROTOCOL_VERSION."""
    assert PROTOCOL_VERSION == 5
    call = encode(Kind.CALL, 7, Poke(3, "x"), 2.5)
    assert call.hex() == "96050107cb4004000000000000a4506f6b6582a66e756d62657203a474657874a178"
    assert encode(Kind.CANCEL, 300).hex() == "960502cd012cc0a0c0"
    assert encode_error(1, "busy", "no").hex() == "96050601c0a462757379a26e6f"


@given(
    st.sampled_from(Kind),
    st.integers(0, 2**63),
    st.integers(-(2**63), 2**63),
    st.text(),
    st.none() | st.floats(0, 1e6) | st.integers(0, 1 << 20),
    st.lists(st.binary()),
)
def test_what_is_encoded_is_decoded(
    kind: Kind, call: int, number: int, text: str, amount: float | None, buffers: list[bytes]
) -> None:
    header, rest = decode([encode(kind, call, Poke(number, text), amount), *buffers])
    assert (header.kind, header.call, header.amount) == (kind, call, amount)
    assert header.message() == Poke(number, text)
    assert [bytes(buffer) for buffer in rest] == buffers


def test_buffers_are_not_copied() -> None:
    memory = bytearray(100)
    _, (buffer,) = decode([encode(Kind.ITEM, 1, Poke(1)), memory])
    memory[5] = 9
    assert buffer[5] == 9


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        GOOD[:5],
        [*GOOD, 1],
        [PROTOCOL_VERSION + 1, *GOOD[1:]],
        [str(PROTOCOL_VERSION), *GOOD[1:]],
        [PROTOCOL_VERSION, 0, *GOOD[2:]],
        [PROTOCOL_VERSION, max(KINDS) + 1, *GOOD[2:]],
        [PROTOCOL_VERSION, 1, "7", *GOOD[3:]],
        [*GOOD[:3], "soon", *GOOD[4:]],
        [*GOOD[:3], float("nan"), *GOOD[4:]],
        [*GOOD[:3], float("inf"), *GOOD[4:]],
        [*GOOD[:4], b"Poke", GOOD[5]],
    ],
    ids=repr,
)
def test_a_header_of_another_shape_is_refused(value: object) -> None:
    with pytest.raises(BadMessage):
        decode([msgpack.packb(value)])


def test_no_frames_garbage_and_oversize_are_refused() -> None:
    for frames in ([], [b""], [b"GET / HTTP/1.1\r\n\r\n"], [bytes(MESSAGE_BYTES_MAX + 1)]):
        with pytest.raises(BadMessage):
            decode(frames)


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_garbage_never_raises_anything_else(frames: list[bytes]) -> None:
    try:
        header, _ = decode(frames)
    except BadMessage:
        return
    assert header.kind in Kind


@pytest.mark.parametrize(("tag", "fields"), [("Nope" * 1000, {}), ("Poke", "text"), ("Poke", {}), ("", None)])
def test_a_header_without_a_known_message_says_so(tag: str, fields: object) -> None:
    header, _ = decode([msgpack.packb([*GOOD[:4], tag, fields])])
    with pytest.raises(BadMessage) as caught:
        header.message()
    assert len(str(caught.value)) < 100, "a long tag is not repeated"
