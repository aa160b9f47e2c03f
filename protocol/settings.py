"""Settings: one TOML file, one frozen dataclass a service, a sentence under every field.

    flag --queue-max 8  >  environment DANGO_PREFILL_QUEUE_MAX=8  >  file [prefill] queue_max = 8  >  default

A section's fields are `int float str bool`, a `Literal` of texts, or `T | None` of these (`none` spells None).
An `int` whose name ends in `_bytes` may be written as a size, such as `768MiB`. A name that nobody declared
stops the process and is told with the nearest that somebody did: a mistyped setting must not pass in silence.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SECTIONS = ("conductor", "prefill", "kvcache", "decode", "serve")
"""The sections that the file may have."""

OTHER_VARIABLES = ("DANGO_CACHE",)
"""Variables of ours that are no setting: where fetched models are kept."""

SIZES = {
    **{"": 1, "B": 1},
    **{f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}
"""Units of a size: binary with an i, decimal without."""

TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

T = TypeVar("T", bound="DataclassInstance")


class SettingsError(Exception):
    """A setting that is unknown, malformed or out of range; says where it was found, its name and its value."""


def add_flags(parser: argparse.ArgumentParser, section: type["DataclassInstance"]) -> None:
    """A flag for every field: `queue_max` becomes `--queue-max`, a bool also gets its `--no-` form.

    What is not given on the command line stays None in the namespace, for `load_section` to fill.
    """
    sentences = field_sentences(section)
    for field, hint in _typed_fields(section):
        shown = _shown(field)
        help_text = f"{sentences.get(field.name, '')} (default: {shown})".strip().replace("%", "%%")
        if hint is bool:
            parser.add_argument(_flag(field.name), action=argparse.BooleanOptionalAction, help=help_text)
        else:
            parser.add_argument(_flag(field.name), metavar=_metavar(field.name, hint), help=help_text)


def load_section(
    section: type[T],
    name: str,
    *,
    flags: argparse.Namespace | None = None,
    environ: Mapping[str, str],
    file: Path | None = None,
) -> T:
    """The settings of one service. Raises SettingsError.

    `name` is the section's name in the file and in the environment; other sections of the file belong to
    other services and are only checked for their names.
    """
    hints = {field.name: hint for field, hint in _typed_fields(section)}
    values: dict[str, Any] = {}
    for where, key, value in (
        *_from_file(file, name, hints),
        *_from_environ(environ, name, hints),
        *_from_flags(flags, hints),
    ):
        try:
            values[key] = _convert(hints[key], key, value)
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from None
    try:
        return section(**values)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"[{name}] {error}") from error


def field_sentences(section: type["DataclassInstance"]) -> dict[str, str]:
    """The sentence under each field, from the source of the class and of those that it extends."""
    sentences: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if "__dataclass_fields__" in vars(kind):
            sentences |= _sentences_of(kind)
    return sentences


def _sentences_of(kind: type) -> dict[str, str]:
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    sentences = {}
    for statement, after in itertools.pairwise(body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                sentences[name] = " ".join(text.split())
    return sentences


def _typed_fields(section: type["DataclassInstance"]) -> list[tuple["dataclasses.Field[Any]", Any]]:
    hints = typing.get_type_hints(section)
    return [(field, hints[field.name]) for field in dataclasses.fields(section)]


def _from_file(file: Path | None, name: str, known: Collection[str]) -> Iterable[tuple[str, str, Any]]:
    if file is None:
        return
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read the settings file {file}: {error}") from error
    for entry, value in content.items():
        if entry not in SECTIONS:
            raise SettingsError(f"{file}: unknown section [{entry}]{_nearest(entry, SECTIONS)}")
        if not isinstance(value, dict):
            raise SettingsError(f"{file}: {entry} must be a section, not {value!r}")
    for key, value in content.get(name, {}).items():
        if key not in known:
            raise SettingsError(f"{file}: [{name}] has no setting {key!r}{_nearest(key, known)}")
        yield f"{file}: [{name}]", key, value


def _from_environ(environ: Mapping[str, str], name: str, known: Collection[str]) -> Iterable[tuple[str, str, Any]]:
    prefix = f"DANGO_{name.upper()}_"
    for variable in sorted(environ):
        _require_section(variable)
        if not variable.startswith(prefix):
            continue
        key = variable.removeprefix(prefix).lower()
        if key not in known:
            names = [prefix + other.upper() for other in known]
            raise SettingsError(f"unknown environment variable {variable}{_nearest(variable, names)}")
        yield f"environment variable {variable}", key, environ[variable]


def _require_section(variable: str) -> None:
    """Raises SettingsError for a variable of ours that is of no section."""
    first, _, rest = variable.partition("_")
    section = rest.partition("_")[0]
    if first == "DANGO" and variable not in OTHER_VARIABLES and section.lower() not in SECTIONS:
        names = [f"DANGO_{other.upper()}_{rest.partition('_')[2]}" for other in SECTIONS]
        raise SettingsError(f"unknown environment variable {variable}{_nearest(variable, names)}")


def _from_flags(flags: argparse.Namespace | None, known: Collection[str]) -> Iterable[tuple[str, str, Any]]:
    given = vars(flags) if flags is not None else {}
    for key in known:
        if given.get(key) is not None:
            yield _flag(key), key, given[key]


def _convert(hint: Any, key: str, value: Any) -> Any:
    """`value`, as text or as TOML has it, in the type of the field. Raises ValueError naming key and value."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value == "none":
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{key} must be one of {', '.join(typing.get_args(hint))}, not {value!r}")
        return value
    try:
        return _exactly(hint, key, value)
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{key} must be {_noun(hint, key)}, not {value!r}") from None


def _exactly(hint: Any, key: str, value: Any) -> Any:
    if type(value) is str and hint is not str:
        value = _parse(hint, key, value.strip())
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint is float or type(value) is not hint:  # NaN and infinity would pass every comparison unseen
        raise ValueError
    return value


def _parse(hint: Any, key: str, text: str) -> Any:
    if hint is bool:
        return TRUTHS[text.lower()]
    return _size(text) if key.endswith("_bytes") else hint(text)


def _size(text: str) -> int:
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    if parts is None:
        raise ValueError(text)
    return int(float(parts[1]) * SIZES[parts[2]])


def _noun(hint: Any, key: str) -> str:
    if hint is int and key.endswith("_bytes"):
        return "a size such as 768MiB"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


def _nearest(word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _metavar(key: str, hint: Any) -> str:
    for kind in (hint, *typing.get_args(hint)):
        if typing.get_origin(kind) is Literal:
            return "|".join(typing.get_args(kind))
    kinds = {hint, *typing.get_args(hint)}
    if key.endswith("_bytes"):
        return "SIZE"
    return "N" if int in kinds else "X" if float in kinds else "TEXT"


def _shown(field: "dataclasses.Field[Any]") -> str:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is dataclasses.MISSING:
        return "must be given"
    if field.name.endswith("_bytes") and isinstance(default, int):
        unit = next((unit for unit in ("GiB", "MiB", "KiB") if default and default % SIZES[unit] == 0), "")
        return f"{default // SIZES[unit]}{unit}"
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default is None else str(default) or "empty"
