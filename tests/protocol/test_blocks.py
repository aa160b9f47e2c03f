"""Block names are the same in every process, and differ wherever the KV would."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.blocks import COMPRESSIONS, BlockLayout, HashRoot, block_hashes, extend_hashes
from protocol.errors import BadMessage
from protocol.ids import token_ids
from protocol.message import build

ROOT_FOLDER = Path(__file__).resolve().parents[2]

LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16, kv_type="bfloat16")
ROOT = HashRoot(model_digest="model", tokenizer_digest="tokenizer", layout=LAYOUT)

GOLDEN = [
    "cb05518f9d73b3b57453f55659286f288eeda9cc71413106a89b8a48d03bd296",
    "f688a7bec395b6e4206512d53a322f557590814f528cd5613736c93ef94db8bc",
    "80edd19494bc11999ad493fb22acf1614a43d75b7d0ff597c9ded23e728f4029",
]
"""Of the tokens 0 to 49. They may change only together with FORMAT_VERSION."""

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_names_are_fixed_for_all_time() -> None:
    assert [name.hex() for name in block_hashes(ROOT, range(50))] == GOLDEN


def test_the_names_of_compressed_blocks_are_others() -> None:
    roots = [replace(ROOT, layout=replace(LAYOUT, compression=form)) for form in COMPRESSIONS]
    assert roots[0] == ROOT
    assert len({root.digest() for root in roots}) == len(COMPRESSIONS) == 3
    with pytest.raises(ValueError, match="compression must be one of none, int8, fp8, not 'zip'"):
        replace(LAYOUT, compression="zip")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_process_gives_the_same_names(seed: str) -> None:
    """B24: each process started its chain from its own random seed; the cache filled and never hit."""
    code = (
        "from protocol.blocks import *\n"
        f"root = HashRoot('model', 'tokenizer', {LAYOUT!r})\n"
        "print(*(name.hex() for name in block_hashes(root, range(50))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=ROOT_FOLDER,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == GOLDEN


@given(tokens_lists, st.integers(1, 20))
def test_only_full_blocks_have_names(tokens: list[int], step: int) -> None:
    root = replace(ROOT, layout=replace(LAYOUT, block_tokens=step))
    names = block_hashes(root, tokens)
    assert len(names) == len(tokens) // step
    assert len(set(names)) == len(names)
    assert all(len(name) == 32 for name in names)


@given(tokens_lists, tokens_lists)
def test_equal_prefixes_have_equal_names(tokens: list[int], more: list[int]) -> None:
    names = block_hashes(ROOT, tokens)
    assert block_hashes(ROOT, tokens + more)[: len(names)] == names


@given(st.lists(st.integers(0, 1000), min_size=48, max_size=48), st.integers(0, 47))
def test_a_changed_token_changes_its_block_and_all_later_ones(tokens: list[int], at: int) -> None:
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    same = [a == b for a, b in zip(block_hashes(ROOT, tokens), block_hashes(ROOT, changed), strict=True)]
    assert same == [block < at // 16 for block in range(3)]


@given(tokens_lists, st.integers(0, 6))
def test_packed_tokens_give_the_same_names(tokens: list[int], known: int) -> None:
    names = block_hashes(ROOT, token_ids(tokens))
    assert names == block_hashes(ROOT, tokens)
    assert extend_hashes(ROOT, names[:known], token_ids(tokens)) == names


@given(tokens_lists, st.integers(0, 6))
def test_extending_gives_the_names_of_the_whole(tokens: list[int], known: int) -> None:
    names = block_hashes(ROOT, tokens)
    assert extend_hashes(ROOT, names[:known], tokens) == names


def test_whatever_the_kv_depends_on_changes_the_names() -> None:
    roots = [
        ROOT,
        replace(ROOT, model_digest="other"),
        replace(ROOT, tokenizer_digest="other"),
        replace(ROOT, tenant="t"),
        replace(ROOT, salt="t"),
        replace(ROOT, layout=replace(LAYOUT, layers=31)),
        replace(ROOT, layout=replace(LAYOUT, kv_heads=4)),
        replace(ROOT, layout=replace(LAYOUT, head_dim=32)),
        replace(ROOT, layout=replace(LAYOUT, kv_type="float16")),
    ]
    firsts = [block_hashes(root, range(16))[0] for root in roots]
    assert len(set(firsts)) == len(roots)


def test_fields_cannot_run_into_each_other() -> None:
    def first(tenant: str, salt: str) -> bytes:
        return block_hashes(replace(ROOT, tenant=tenant, salt=salt), range(16))[0]

    splits = [first("abc"[:cut], "abc"[cut:]) for cut in range(4)]
    assert len(set(splits)) == 4


def test_a_block_cannot_stand_for_two() -> None:
    """32 tokens as one block of 32 or as two of 16: other names throughout."""
    wide = replace(ROOT, layout=replace(LAYOUT, block_tokens=32))
    assert not set(block_hashes(wide, range(32))) & set(block_hashes(ROOT, range(32)))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_32_bits_is_an_error_not_another_name(token: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes(ROOT, [token] * 16)


def test_bytes_of_a_block() -> None:
    assert LAYOUT.run_bytes == 2 * 16 * 3 * 64 * 2
    assert LAYOUT.block_bytes == 30 * LAYOUT.run_bytes
    sizes = [replace(LAYOUT, kv_type=kind).run_bytes for kind in ("float16", "bfloat16", "float32")]
    assert [b / a for a, b in pairwise(sizes)] == [1, 2]


@pytest.mark.parametrize(
    "change", [{"kv_type": "int8"}, {"layers": 0}, {"kv_heads": -1}, {"head_dim": 0}, {"block_tokens": 0}]
)
def test_a_layout_that_cannot_be_is_refused_on_arrival(change: dict[str, object]) -> None:
    plain = {"layers": 2, "kv_heads": 1, "head_dim": 8, "block_tokens": 4, "kv_type": "float32"}
    assert build(BlockLayout, plain).run_bytes == 2 * 4 * 8 * 4
    with pytest.raises(BadMessage):
        build(BlockLayout, plain | change)
