"""A member that differs from its cluster is refused by the name of the difference."""

from dataclasses import fields, replace
from typing import Any

import pytest

from protocol.blocks import BlockLayout
from protocol.cluster import PROTOCOL_VERSION, Manifest, Mismatch
from protocol.errors import RemoteError
from protocol.message import build, pack, unpack_plain

MANIFEST = Manifest(
    model="tiny",
    model_digest="aa",
    tokenizer_digest="bb",
    context_tokens=2048,
    layout=BlockLayout(layers=3, kv_heads=2, head_dim=16, block_tokens=16, kv_type="float32"),
)

DIFFERENCES: list[tuple[str, Any]] = [
    ("model", "huge"),
    ("model_digest", "ab"),
    ("tokenizer_digest", "bc"),
    ("context_tokens", 4096),
    ("protocol_version", PROTOCOL_VERSION + 1),
    ("layers", 4),
    ("kv_heads", 1),
    ("head_dim", 32),
    ("block_tokens", 32),
    ("kv_type", "bfloat16"),
    ("compression", "int8"),
]


def changed(name: str, value: Any) -> Manifest:
    if name in {f.name for f in fields(BlockLayout)}:
        return replace(MANIFEST, layout=replace(MANIFEST.layout, **{name: value}))
    return replace(MANIFEST, **{name: value})


def value_of(name: str) -> Any:
    return getattr(MANIFEST, name, None) or getattr(MANIFEST.layout, name)


@pytest.mark.parametrize(("name", "value"), DIFFERENCES)
def test_a_difference_is_named_with_both_values(name: str, value: Any) -> None:
    """B26: prefill and decode of different KV type or block size paired up, and made corrupt text."""
    with pytest.raises(Mismatch) as caught:
        MANIFEST.require_equal(changed(name, value))
    assert str(caught.value) == f"{name} is {value!r}, but this cluster has {value_of(name)!r}"


def test_every_field_of_the_manifest_is_compared() -> None:
    everything = {f.name for f in fields(Manifest)} - {"layout"} | {f.name for f in fields(BlockLayout)}
    assert {name for name, _ in DIFFERENCES} == everything


def test_equal_manifests_pass_and_survive_the_wire() -> None:
    again = build(Manifest, unpack_plain(pack(MANIFEST)))
    MANIFEST.require_equal(again)


def test_a_mismatch_arrives_as_a_mismatch() -> None:
    error = RemoteError.of("mismatch", "kv_type is x")
    assert isinstance(error, Mismatch)
    assert str(error) == "kv_type is x"


def test_the_root_of_block_names_depends_on_tenant_and_salt() -> None:
    digests = {MANIFEST.root(*who).digest() for who in [("", ""), ("a", ""), ("", "a"), ("a", "a")]}
    assert len(digests) == 4
