"""Messages survive the wire unchanged, and nothing else gets in."""

from dataclasses import FrozenInstanceError, field
from enum import Enum
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BadMessage
from protocol.ids import BlockHash, Ids, token_ids
from protocol.message import MESSAGE_BYTES_MAX, Message, build, pack, unpack_plain


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(Message):
    name: str
    weight: float = 1.0


class Row(NamedTuple):
    name: BlockHash
    slot: int
    seconds: float


class Sample(Message):
    number: int
    ratio: float
    text: str
    flag: bool
    raw: bytes
    colour: Colour
    inner: Inner
    maybe: int | None = None
    tokens: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    inners: list[Inner] = field(default_factory=list)
    nested: list[list[int]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    by_name: dict[str, Inner] = field(default_factory=dict)
    colours: list[Colour] = field(default_factory=list)
    ids: Ids = field(default_factory=token_ids)
    rows: list[Row] = field(default_factory=list)


class Positive(Message):
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be positive, not {self.count}")


numbers = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)
inners = st.builds(Inner, name=st.text(), weight=floats)
samples = st.builds(
    Sample,
    number=numbers,
    ratio=floats,
    text=st.text(),
    flag=st.booleans(),
    raw=st.binary(),
    colour=st.sampled_from(Colour),
    inner=inners,
    maybe=st.none() | numbers,
    tokens=st.lists(numbers),
    hashes=st.lists(st.binary(min_size=32, max_size=32).map(BlockHash)),
    inners=st.lists(inners),
    nested=st.lists(st.lists(numbers)),
    held=st.dictionaries(st.text(), numbers),
    by_name=st.dictionaries(st.text(), inners),
    colours=st.lists(st.sampled_from(Colour)),
    ids=st.lists(st.integers(0, 2**32 - 1)).map(token_ids),
    rows=st.lists(st.builds(Row, st.binary().map(BlockHash), numbers, floats)),
)

PLAIN: dict[str, Any] = {
    "number": 1,
    "ratio": 0.5,
    "text": "x",
    "flag": True,
    "raw": b"r",
    "colour": "red",
    "inner": {"name": "i"},
}


@given(samples)
def test_what_is_packed_is_unpacked(sample: Sample) -> None:
    again = build(Sample, unpack_plain(pack(sample)))
    assert again == sample
    assert pack(again) == pack(sample)


def test_missing_fields_take_their_defaults() -> None:
    sample = build(Sample, PLAIN)
    assert (sample.maybe, sample.tokens, sample.inner.weight) == (None, [], 1.0)
    assert build(Sample, PLAIN).tokens is not sample.tokens


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"number": "1"}, "number must be int, not str"),
        ({"number": True}, "number must be int, not bool"),
        ({"number": 1.0}, "number must be int, not float"),
        ({"ratio": "0.5"}, "ratio must be float, not str"),
        ({"ratio": None}, "ratio must be float, not NoneType"),
        ({"text": b"x"}, "text must be str, not bytes"),
        ({"flag": 1}, "flag must be bool, not int"),
        ({"raw": "r"}, "raw must be bytes, not str"),
        ({"colour": "green"}, "green"),
        ({"colour": ["red"]}, "red"),
        ({"inner": "i"}, "Inner is not a map"),
        ({"inner": {}}, "missing ['name']"),
        ({"inner": {"name": "i", "size": 1}}, "unknown fields ['size']"),
        ({"maybe": "x"}, "maybe must be int, not str"),
        ({"tokens": 3}, "tokens must be a list, not int"),
        ({"tokens": [1, "2"]}, "tokens must be int, not str"),
        ({"tokens": [1, True]}, "tokens must be int, not bool"),
        ({"hashes": ["x"]}, "hashes must be bytes, not str"),
        ({"nested": [[1], 2]}, "nested must be a list, not int"),
        ({"held": {"a": "b"}}, "held must be int, not str"),
        ({"held": [1]}, "held must be a map with text keys"),
        ({"held": {b"a": 1}}, "held must be a map with text keys"),
        ({"rows": [{"name": b"n", "slot": 1, "seconds": 0.5}]}, "rows must be a list of name, slot, seconds"),
        ({"rows": [[b"n", 1]]}, "rows must be a list of name, slot, seconds"),
        ({"rows": [[b"n", 1, 0.5], [b"n", 1.0, 0.5]]}, "rows.slot must be int, not float"),
        ({"ids": [1, 2]}, "ids must be bytes, not list"),
        ({"ids": b"12345"}, "ids has 5 bytes: no whole number of tokens"),
        ({"surplus": 1}, "unknown fields ['surplus']"),
    ],
)
def test_a_field_of_another_shape_is_refused_by_name(change: dict[str, Any], names: str) -> None:
    with pytest.raises(BadMessage) as caught:
        build(Sample, PLAIN | change)
    assert names in str(caught.value)


@pytest.mark.parametrize("name", [*PLAIN])
def test_a_required_field_is_missed_by_name(name: str) -> None:
    with pytest.raises(BadMessage, match=f"missing \\['{name}'\\]"):
        build(Sample, {key: value for key, value in PLAIN.items() if key != name})


def test_whole_numbers_are_good_floats() -> None:
    sample = build(Sample, PLAIN | {"ratio": 2, "rows": [[b"n", 1, 2]]})
    assert (sample.ratio, type(sample.ratio)) == (2.0, float)
    assert (sample.rows, type(sample.rows[0].seconds)) == ([Row(BlockHash(b"n"), 1, 2.0)], float)


def test_what_the_class_itself_refuses_is_a_bad_message() -> None:
    with pytest.raises(BadMessage, match="count must be positive, not 0"):
        build(Positive, unpack_plain(msgpack.packb({"count": 0})))


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_message_or_no_sample(data: bytes) -> None:
    with pytest.raises(BadMessage):
        build(Sample, unpack_plain(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81",
        msgpack.packb({"number": 1}) + b"\x00",
        msgpack.packb({1: 2}),
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\x01",
        b"\x81\xa5inner" * 600 + b"\xc0",
        b"\xd4\x01\x00",
        b"\xa2\xff\xfe",
    ],
    ids=lambda data: f"{len(data)}-{data[:4].hex()}",
)
def test_hostile_bytes_are_a_bad_message(data: bytes) -> None:
    with pytest.raises(BadMessage):
        build(Sample, unpack_plain(data))


def test_oversize_is_refused_unread() -> None:
    with pytest.raises(BadMessage, match=str(MESSAGE_BYTES_MAX)):
        build(Sample, unpack_plain(bytes(MESSAGE_BYTES_MAX + 1)))


def test_ids_travel_as_their_bytes_little_endian() -> None:
    sample = build(Sample, PLAIN | {"ids": b"\x01\x00\x00\x00\xff\xff\xff\xff"})
    assert list(sample.ids) == [1, 2**32 - 1]
    assert unpack_plain(pack(sample))["ids"] == b"\x01\x00\x00\x00\xff\xff\xff\xff"


def test_a_row_travels_without_names() -> None:
    sample = build(Sample, PLAIN | {"rows": [[b"n", 7, 0.5]]})
    assert unpack_plain(pack(sample))["rows"] == [[b"n", 7, 0.5]]
    assert sample.rows[0].slot == 7


def test_what_is_no_message_cannot_be_packed() -> None:
    with pytest.raises(TypeError, match="object does not travel"):
        pack(Inner(object()))  # type: ignore[arg-type]


def test_messages_are_frozen() -> None:
    inner = Inner("i")
    with pytest.raises(FrozenInstanceError):
        inner.name = "j"  # type: ignore[misc]


def test_two_messages_of_one_name_cannot_exist() -> None:
    with pytest.raises(AssertionError, match="two messages named Inner"):
        type("Inner", (Message,), {"__annotations__": {"other": int}})
