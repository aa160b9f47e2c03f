"""A request's body: strict JSON, an object, nothing that two readers could understand differently."""

import json
import math
import re
from typing import Any, NoReturn

from conductor.problem import Problem, invalid

NESTING_MAX = 64
"""No request that we serve nests deeper than 10; JSON readers run out of stack at some hundreds."""

MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape for half of a character; mostly the other half follows."""


def decode(data: bytes) -> dict[str, Any]:
    """The object that `data` spells. Raises Problem: no UTF-8, no JSON, no object, a key twice, NaN, too deep."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant
        )
    except UnicodeDecodeError:
        raise invalid("The body is not UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if type(value) is not dict:
        raise invalid(f"The body must be a JSON object, not {_name(value)}.", code="invalid_json")
    _require_shallow(value)
    if MAY_BE_HALF.search(data):
        _require_unicode(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise invalid(f"The body has the key {twice[:64]!r} twice in one object.", twice[:64], "duplicate_key")
    return made


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:32]} is too large for a number")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _require_shallow(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(NESTING_MAX):
        parts = [part.values() if type(part) is dict else part for part in level]
        level = [entry for part in parts for entry in part if type(entry) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def _require_unicode(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("The body holds half of a character (a lone surrogate).", code="invalid_json") from None


def _too_deep() -> Problem:
    return invalid(f"The body nests deeper than {NESTING_MAX} levels.", code="invalid_json")


def _name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
