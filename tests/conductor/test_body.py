"""Strict JSON."""

import pytest

from conductor.body import NESTING_MAX, decode
from conductor.problem import Problem


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def test_an_object_is_read_as_it_is() -> None:
    data = '{"a": [1, 2.5, true, null, "\\u00f6 \\ud83d\\udc4b"], "b": {"a": "東京"}}'
    assert decode(data.encode()) == {"a": [1, 2.5, True, None, "ö 👋"], "b": {"a": "東京"}}


def test_nesting_is_bounded_exactly() -> None:
    assert decode(nested(NESTING_MAX))
    with pytest.raises(Problem, match="deeper"):
        decode(nested(NESTING_MAX + 1))


@pytest.mark.parametrize(
    "data", [nested(100_000), b"[" * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_any_depth_is_refused_and_none_ends_the_process(data: bytes) -> None:
    with pytest.raises(Problem):
        decode(data)


@pytest.mark.parametrize("data", [b'{"a": 1, "a": 1}', b'{"b": [{"a": 1, "c": 2, "a": 3}]}'])
def test_a_key_may_come_only_once_in_an_object(data: bytes) -> None:
    with pytest.raises(Problem) as caught:
        decode(data)
    assert (caught.value.code, caught.value.param) == ("duplicate_key", "a")


@pytest.mark.parametrize(
    "number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"01", b"+1"]
)
def test_what_is_no_finite_number_is_refused(number: bytes) -> None:
    with pytest.raises(Problem) as caught:
        decode(b'{"a": ' + number + b"}")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "data", [b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": "\\ud83d \\udc4b"}', b'{"a": "\xc3"}']
)
def test_half_a_character_is_refused(data: bytes) -> None:
    with pytest.raises(Problem):
        decode(data)


@pytest.mark.parametrize(
    ("data", "name"), [(b"[]", "array"), (b"null", "null"), (b"true", "boolean"), (b"1", "number")]
)
def test_what_is_no_object_is_named(data: bytes, name: str) -> None:
    with pytest.raises(Problem, match=name):
        decode(data)
