"""The documents speak of the code as it is: what they name exists, and what must be named is."""

import argparse
import dataclasses
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from conductor.config import ConductorConfig
from decode_pool.config import DecodeConfig
from deploy import chat, serve
from deploy.config import ServeConfig
from kvcache_pool import operate
from kvcache_pool.api import Grant
from kvcache_pool.config import KVCacheConfig
from prefill_pool.config import PrefillConfig
from protocol.errors import RemoteError
from protocol.message import Message
from protocol.registry import Timing
from protocol.settings import add_flags, field_sentences

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE_LINES_MAX = 200
CONTRACTS = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in [*(ROOT / "protocol").glob("*.py"), *ROOT.glob("*/api.py"), *ROOT.glob("*/api/*.py")]
    if path.name != "__init__.py"
)
SECTIONS = {
    "conductor": ConductorConfig,
    "prefill": PrefillConfig,
    "kvcache": KVCacheConfig,
    "decode": DecodeConfig,
    "serve": ServeConfig,
}
WIRE_KINDS = {"error", "bad_message", "busy"}
"""Kinds that rpc itself answers with; they have no class of their own."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def messages() -> list[type[Message]]:
    """Every message of the contracts, not those that tests declare."""
    for name in CONTRACTS:
        importlib.import_module(name)
    return [kind for kind in Message.tags.values() if kind.__module__ in CONTRACTS]


def row_of(name: str, table: str) -> str:
    """The table row whose first cell is `name`; empty if there is none."""
    return next((line for line in table.splitlines() if line.startswith(f"| `{name}` |")), "")


@pytest.mark.parametrize("kind", [*messages(), Grant, Timing], ids=lambda kind: kind.__name__)
def test_every_message_has_its_row_with_all_its_fields(kind: type) -> None:
    row = row_of(kind.__name__, text_of("docs/protocol.md"))
    assert row, f"docs/protocol.md has no row for {kind.__name__}"
    names = [*inspect.get_annotations(kind)]
    cell = row.split(" | ")[2]
    assert [part.strip("`") for part in cell.split()] == (names or ["none"])


def test_every_error_kind_has_its_row() -> None:
    messages()
    ours = {kind: error for kind, error in RemoteError.kinds.items() if error.__module__ in CONTRACTS}
    table = text_of("docs/protocol.md").partition("## Error kinds")[2]
    assert len(ours) > 8
    assert [kind for kind, error in ours.items() if f"`{error.__name__}`" not in row_of(kind, table)] == []
    assert [kind for kind in WIRE_KINDS if not row_of(kind, table)] == []
    told = set(re.findall(r"^\| `(\w+)` \| `\w+`", table, re.MULTILINE))
    assert told == ours.keys() | WIRE_KINDS


def paths_in(text: str) -> set[str]:
    """What a text names as a file or folder of the tree: in backticks or as the target of a link."""
    quoted = re.findall(r"`([\w.]+(?:/[\w.-]+)*/?)`", text)
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    return {name for name in quoted if re.search(r"\w/\w|/$", name) or name.endswith(".md")} | set(linked)


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_files_and_folders_that_documents_name_exist(name: str) -> None:
    text = text_of(name)
    found = paths_in(re.sub(r"`POST[^|]*\||`GET[^|]*\|", "", text))
    here = (ROOT / name).parent
    missing = {path for path in found if not (ROOT / path).exists() and not (here / path).exists()}
    assert {path for path in missing if not re.fullmatch(r"\w+/(json|name)|text/\w+", path)} == set()


def test_decision_records_name_files_that_exist_and_keep_their_length() -> None:
    records = sorted((ROOT / "docs/decisions").glob("*.md"))
    for record in records:
        text = record.read_text(encoding="utf-8")
        assert {path for path in paths_in(text) if not (ROOT / path).exists()} == set(), record.name
        assert 30 <= len(text.splitlines()) <= 60, record.name
        assert text.startswith(f"# {record.name[:4]} "), record.name
    assert [record.name[:4] for record in records] == [f"{n:04}" for n in range(1, len(records) + 1)]


def test_the_tree_in_the_readme_is_the_tree() -> None:
    block = text_of("README.md").partition("## The tree")[2].partition("\nTo change")[0]
    told = set(re.findall(r"^    (\w+)/ ", block, re.MULTILINE))
    there = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert there - told == set()
    assert {name for name in told if not (ROOT / name).is_dir()} == set()


def test_the_architecture_fits_on_a_few_pages() -> None:
    assert len(text_of("docs/architecture.md").splitlines()) <= ARCHITECTURE_LINES_MAX


def test_constants_in_the_architecture_exist() -> None:
    table = text_of("docs/architecture.md").partition("## Bounds and deadlines")[2]
    names = set(re.findall(r"`([A-Z][A-Z_]+)`", table))
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("[a-z]*/**/*.py"))
    assert len(names) > 20
    assert {name for name in names if not re.search(rf"^{name} = ", sources, re.MULTILINE)} == set()


def flags_of(verb: str, *words: str) -> set[str]:
    """Every flag that `dango VERB WORD ...` takes."""
    parser = argparse.ArgumentParser()
    if verb == "kvcache" and words and words[0] in operate.VERBS:
        operate.add_arguments(parser, words[0])
    elif verb == "serve":
        serve.add_arguments(parser)
    elif verb == "chat":
        chat.add_arguments(parser)
    else:
        parser.add_argument("--config")
        add_flags(parser, SECTIONS[verb])
    return {flag for action in parser._actions for flag in action.option_strings}


def commands_in(text: str) -> list[list[str]]:
    """`dango VERB ...`, in code or in a sentence; what `make run ARGS="..."` hands on counts as `dango serve`."""
    text = re.sub(r" *\\\n *", " ", text)
    text = re.sub(r'make run ARGS="([^"]*)"', r"`dango serve \1`", text)
    found = re.findall(rf"\bdango (?:{'|'.join((*SECTIONS, 'chat'))})\b[^`\n>#]*", text)
    return [shlex.split(command.replace("'", "")) for command in found]


@pytest.mark.parametrize("name", ["README.md", "docs/configuration.md", "docs/pool.md"])
def test_flags_in_documents_exist(name: str) -> None:
    commands = commands_in(text_of(name))
    assert commands
    unknown = [
        f"{verb} {word}"
        for _, verb, *words in commands
        for word in words
        if word.startswith("--") and word not in flags_of(verb, *words)
    ]
    assert unknown == []


def test_the_search_for_flags_sees_them() -> None:
    assert commands_in("`dango prefill --host a \\\n  --port 1`") == [
        ["dango", "prefill", "--host", "a", "--port", "1"]
    ]
    assert commands_in('`make run ARGS="--decode 2"` and') == [["dango", "serve", "--decode", "2"]]
    assert "--decode" in flags_of("serve")
    assert "--decode" not in flags_of("prefill")
    assert "--hard" in flags_of("kvcache", "pin")
    assert not {"--hard", "--listen"} & flags_of("kvcache", "stats")


@pytest.mark.parametrize("name", SECTIONS)
def test_every_setting_is_told_with_its_default(name: str) -> None:
    table = text_of("docs/configuration.md").partition(f"## [{name}]")[2].partition("\n## ")[0]
    told = [line for line in table.splitlines() if line.startswith("| `")]
    assert told == setting_rows(SECTIONS[name])


def setting_rows(section: type) -> list[str]:
    """The rows of docs/configuration.md, one a setting, as they must be."""
    sentences = field_sentences(section)
    return [
        f"| `{field.name}` | `{shown(field)}` | {sentences[field.name]} |" for field in dataclasses.fields(section)
    ]


def shown(field: "dataclasses.Field[object]") -> str:
    """A default as the file would spell it."""
    value = field.default
    if field.name.endswith("_bytes") and isinstance(value, int):
        return f'"{value >> 20}MiB"'
    if isinstance(value, bool):
        return str(value).lower()
    return '"none"' if value is None else f'"{value}"' if isinstance(value, str) else str(value)
