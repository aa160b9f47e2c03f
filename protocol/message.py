"""Messages: frozen dataclasses that travel as msgpack and are checked field by field on arrival.

A message on the wire is a msgpack map of its field names, beside a tag (its class name). Fields may be
`int float str bool bytes Ids`, `None` unions, `list[T]`, `dict[str, T]`, string enums, other messages and rows. A
missing field takes its default; an unknown field, a wrong type or a value that the class's own
`__post_init__` refuses is a `BadMessage`. Nothing is ever evaluated, looked up by attribute or unpickled.

A *row* is a NamedTuple of plain fields, for what comes by the hundred: it travels as a list of its values, without
their names, and all of them must be there.
"""

import types
import typing
from array import array
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, dataclass_transform

import msgpack

from protocol.errors import BadMessage
from protocol.ids import Ids

MESSAGE_BYTES_MAX = 16 << 20
"""A header larger than this is refused unread: 1 M tokens are 4 MB, so this is no prompt."""

PLAIN = frozenset((int, float, str, bool, bytes))
"""Types that msgpack brings as they are."""

Check = Callable[[Any], Any]
M = TypeVar("M", bound="Message")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """Base of all messages. Subclassing makes a frozen dataclass and registers its name as the tag."""

    tags: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        assert cls.__name__ not in Message.tags, f"two messages named {cls.__name__}"
        Message.tags[cls.__name__] = cls


def pack(value: Any) -> bytes:
    """A message's fields as msgpack, without its tag; or a list or map of such and of plain values."""
    return msgpack.packb(value, default=_plain)  # type: ignore[no-any-return]


def unpack_plain(data: bytes | bytearray | memoryview) -> Any:
    """Any msgpack value within the size limit. Raises BadMessage."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"a message of {len(data)} bytes; the limit is {MESSAGE_BYTES_MAX}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises half a dozen unrelated classes on bad input
        raise BadMessage(f"not msgpack: {type(error).__name__}") from error


def build(kind: type[M], value: Any) -> M:
    """A `kind` from a plain map, every field checked. Raises BadMessage."""
    if type(value) is not dict:
        raise BadMessage(f"{kind.__name__} is not a map")
    schema = _schema(kind)  # type: ignore[arg-type]
    plain, checks = schema.plain, schema.checks
    whole = value.keys() == checks.keys()
    if not whole:
        schema.require_names(kind.__name__, value)
    try:
        entries = {
            name: entry if type(entry) is plain[name] else checks[name](entry) for name, entry in value.items()
        }
        if not whole or schema.checks_itself:
            return kind(**entries)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadMessage(f"{kind.__name__}: {error}") from error
    made = object.__new__(kind)  # its `__init__` would only set these, each by the detour of a frozen class
    made.__dict__.update(entries)
    return made


def _plain(value: Any) -> Any:
    """What msgpack asks for when it meets what it does not know."""
    if isinstance(value, Message):
        return value.__dict__  # the fields, in their order: a message has no other attributes
    if isinstance(value, array):
        return memoryview(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} does not travel")


@dataclass(frozen=True)
class _Schema:
    """What the fields of one message may be."""

    checks: dict[str, Check]
    plain: dict[str, type | None]
    """Entries of exactly this type need no check: most do not, and a call less for each field adds up."""
    required: frozenset[str]
    checks_itself: bool

    def require_names(self, kind: str, value: dict[str, Any]) -> None:
        """Raises BadMessage for fields too many or too few."""
        unknown = value.keys() - self.checks.keys()
        missing = self.required - value.keys()
        if unknown or missing:
            raise BadMessage(f"{kind}: unknown fields {sorted(unknown)}, missing {sorted(missing)}")


@cache
def _schema(kind: type[Message]) -> _Schema:
    hints = typing.get_type_hints(kind)
    declared = fields(kind)  # type: ignore[arg-type]
    bare = {f.name: _bare(hints[f.name]) for f in declared}
    return _Schema(
        checks={f.name: _check(hints[f.name], f.name) for f in declared},
        plain={name: hint if hint in PLAIN else None for name, hint in bare.items()},
        required=frozenset(f.name for f in declared if f.default is MISSING and f.default_factory is MISSING),
        checks_itself=hasattr(kind, "__post_init__"),
    )


def _bare(hint: Any) -> Any:
    while hasattr(hint, "__supertype__"):  # NewType
        hint = hint.__supertype__
    return hint


def _check(hint: Any, name: str) -> Check:
    """A function that returns a value of type `hint` or raises ValueError naming the field."""
    hint = _bare(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [arg for arg in arguments if arg is not type(None)]
        assert (len(inner), len(arguments)) == (1, 2), f"{name}: only `T | None` unions travel"
        return _optional(_check(inner[0], name))
    if origin is list:
        return _list_of(arguments[0], name)
    if origin is dict:
        return _dict_of(_check(arguments[1], name), name)
    if isinstance(hint, type) and issubclass(hint, Message):
        return partial(build, hint)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _row_of(hint, name)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint is array:
        return lambda value: _ids(value, name)
    return _exactly(hint, name)


def _exactly(kind: type, name: str) -> Check:
    assert kind in PLAIN, f"{name}: {kind} does not travel"

    def check(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise ValueError(f"{name} must be {kind.__name__}, not {type(value).__name__}")

    return check


def _ids(value: Any, name: str) -> Ids:
    if type(value) is not bytes:
        raise ValueError(f"{name} must be bytes, not {type(value).__name__}")
    tokens = array("I")
    if len(value) % tokens.itemsize:
        raise ValueError(f"{name} has {len(value)} bytes: no whole number of tokens")
    tokens.frombytes(value)
    return tokens


def _optional(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def _list_of(hint: Any, name: str) -> Check:
    item = _check(hint, name)
    plain = PLAIN & {_bare(hint)}

    def check(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"{name} must be a list, not {type(value).__name__}")
        if plain.issuperset(map(type, value)):
            return value  # token ids and hashes come by the thousand: one cheap pass
        return [item(entry) for entry in value]

    return check


def _row_of(kind: type[tuple[Any, ...]], name: str) -> Check:
    hints = {field: _bare(hint) for field, hint in typing.get_type_hints(kind).items()}
    types, checks = [*hints.values()], [_exactly(hint, f"{name}.{field}") for field, hint in hints.items()]

    def check(value: Any) -> Any:
        if type(value) is not list or len(value) != len(types):
            raise ValueError(f"{name} must be a list of {', '.join(hints)}")
        if [*map(type, value)] != types:
            value = [right(entry) for right, entry in zip(checks, value, strict=True)]
        return tuple.__new__(kind, value)

    return check


def _dict_of(item: Check, name: str) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise ValueError(f"{name} must be a map with text keys")
        return {key: item(entry) for key, entry in value.items()}

    return check
