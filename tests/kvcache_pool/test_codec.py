"""Packed runs come back within the bounds that the codec names, and what has no bounds is refused."""

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvcache_pool.api import NotFinite
from kvcache_pool.codec import CHUNK_ELEMENTS, FP8, Bytes, Codec
from protocol.blocks import KV_TYPE_BYTES, BlockLayout

KINDS = sorted(KV_TYPE_BYTES)
FORMS = ["int8", "fp8"]
EVERY = list(itertools.product(KINDS, FORMS))
TOKENS, HEADS, DIM = 4, 2, 6
SHAPE = (2, TOKENS, HEADS, DIM)
PLACES = {"bfloat16": 8, "float16": 11, "float32": 22}
"""Binary places of the nearest number of a type; of float32 two fewer, which the arithmetic takes."""
LEAST = {"bfloat16": 2.0**-117, "float16": 2.0**-25, "float32": 2.0**-117}
"""What rounds to nothing: half of float16's last place; of the others 448 steps that have no inverse."""


def a_codec(kind: str, form: str) -> Codec:
    return Codec(a_layout(kind, form))


def a_layout(kind: str, form: str, block_tokens: int = TOKENS) -> BlockLayout:
    return BlockLayout(
        layers=1, kv_heads=HEADS, head_dim=DIM, block_tokens=block_tokens, kv_type=kind, compression=form
    )


def narrowed(values: np.ndarray, kind: str) -> np.ndarray:
    """Values of any float type as the nearest of this one: float32, but exact in it."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(values).to(getattr(torch, kind)).to(torch.float32).numpy()


def runs_of(values: np.ndarray, kind: str) -> Bytes:
    """Values [n, ...] as the bytes of runs [n, run_bytes]."""
    tensor = torch.from_numpy(values).to(getattr(torch, kind))
    return tensor.reshape(len(values), -1).view(torch.uint8).numpy()


def values_of(runs: Bytes, kind: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    tensor = torch.from_numpy(runs).view(getattr(torch, kind)).to(torch.float32)
    return tensor.reshape(len(runs), *shape).numpy()


def there_and_back(values: np.ndarray, kind: str, form: str) -> np.ndarray:
    """Values [n, *SHAPE], packed and unpacked."""
    layout, codec, runs = a_layout(kind, form), a_codec(kind, form), runs_of(values, kind)
    packed = np.empty((len(runs), layout.run_bytes), np.uint8)
    codec.pack(runs, packed)
    back = np.empty_like(runs)
    codec.unpack(packed, back)
    return values_of(back, kind)


def normal(count: int, kind: str, seed: int = 0) -> np.ndarray:
    """KV as models make it: some channels of keys far from zero."""
    dice = np.random.default_rng(seed)
    values = dice.standard_normal((count, *SHAPE)).astype(np.float32)
    values[:, 0, :, :, ::3] += dice.choice([-20, 20], (HEADS, 2))
    return narrowed(values, kind)


def bounds(values: np.ndarray, form: str) -> np.ndarray:
    """How far each of these may be off, but for the rounding of its type; float64 [n, *SHAPE]."""
    exact = values.astype(np.float64)
    keys, rest = exact[:, 0], exact[:, 1]
    least, greatest = keys.min(1, keepdims=True), keys.max(1, keepdims=True)
    top = np.abs(rest).max(-1, keepdims=True)
    if form == "int8":
        steps = (greatest - least) / 255 + 0 * keys, top / 127 + 0 * rest
        return np.stack([step / 2 for step in steps], 1)
    middle, half = (greatest + least) / 2, (greatest - least) / 2
    return np.stack(
        [
            np.maximum(np.abs(keys - middle) / 16, half / 448 / 2**10),
            np.maximum(np.abs(rest) / 16, top / 448 / 2**10),
        ],
        1,
    )


def require_within(values: np.ndarray, back: np.ndarray, kind: str, form: str) -> None:
    size = np.abs(values).astype(np.float64)
    size[:, 0] = size[:, 0].max(1, keepdims=True)
    allowed = 1.001 * bounds(values, form) + size * 2.0 ** -PLACES[kind] + LEAST[kind]
    off = np.abs(back.astype(np.float64) - values)
    assert (off <= allowed).all(), (off - allowed).max()


finite = st.floats(-(2.0**126), 2.0**126, width=32)
small = st.floats(-60000, 60000, width=32)


@pytest.mark.parametrize(("kind", "form"), EVERY)
@given(data=st.data())
def test_what_comes_back_is_within_its_bounds(kind: str, form: str, data: st.DataObject) -> None:
    elements = small if kind == "float16" else finite
    values = narrowed(data.draw(arrays(np.float32, (2, *SHAPE), elements=elements)), kind)
    require_within(values, there_and_back(values, kind, form), kind, form)


@pytest.mark.parametrize(("kind", "form"), EVERY)
@given(seed=st.integers(0, 1000), outlier=st.sampled_from([0.0, 1e-30, 1e4]))
def test_kv_with_outliers_is_within_its_bounds_and_stays_so(
    kind: str, form: str, seed: int, outlier: float
) -> None:
    values = normal(3, kind, seed)
    values[1, :, 0, 0, 0] = narrowed(np.float32([outlier]), kind)[0]
    back = there_and_back(values, kind, form)
    require_within(values, back, kind, form)
    again = back
    for _ in range(5):  # from segment to segment, through pages each time
        again = there_and_back(again, kind, form)
    rounding = 2.0**-20 * np.abs(back).max() + np.abs(back) * 2.0 ** -PLACES[kind]
    assert (np.abs(again - back) <= rounding).all()


@pytest.mark.parametrize(("kind", "form"), [pair for pair in EVERY if pair[0] != "float32"])
def test_extremes_come_back_exactly(kind: str, form: str) -> None:
    values = normal(64, kind)
    back = there_and_back(values, kind, form)
    assert np.array_equal(back[:, 0].max(1), values[:, 0].max(1))
    assert np.array_equal(back[:, 0].min(1), values[:, 0].min(1))
    assert np.array_equal(np.abs(back[:, 1]).max(-1), np.abs(values[:, 1]).max(-1))


@pytest.mark.parametrize(("kind", "form"), EVERY)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 2.0**-126, 2.0**-140, 60000.0])
def test_what_is_the_same_everywhere_comes_back_as_it_was(kind: str, form: str, value: float) -> None:
    values = narrowed(np.full((1, *SHAPE), value, np.float32), kind)
    back = there_and_back(values, kind, form)
    assert np.array_equal(back[:, 0], values[:, 0])
    assert np.allclose(back[:, 1], values[:, 1], rtol=1e-6, atol=LEAST[kind])


@pytest.mark.parametrize(("kind", "form"), EVERY)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@given(where=st.tuples(*(st.integers(0, extent - 1) for extent in (3, *SHAPE))))
def test_what_is_not_finite_is_refused(kind: str, form: str, wrong: float, where: tuple[int, ...]) -> None:
    values = normal(3, kind)
    values[where] = wrong
    with pytest.raises(NotFinite, match="not finite"):
        there_and_back(values, kind, form)


@pytest.mark.parametrize("form", FORMS)
def test_keys_that_are_too_far_apart_are_refused(form: str) -> None:
    values = normal(1, "float32")
    values[0, 0, :2, 0, 0] = 3e38, -3e38
    with pytest.raises(NotFinite):
        there_and_back(values, "float32", form)


@pytest.mark.parametrize(("kind", "form"), EVERY)
def test_many_runs_at_once_are_packed_as_each_alone(kind: str, form: str) -> None:
    layout, codec = a_layout(kind, form), a_codec(kind, form)
    count = 2 * CHUNK_ELEMENTS // (2 * TOKENS * HEADS * DIM) + 3
    runs = runs_of(normal(count, kind), kind)
    packed, one = np.empty((count, layout.run_bytes), np.uint8), np.empty((1, layout.run_bytes), np.uint8)
    codec.pack(runs, packed)
    for at in (0, 1, count // 2, count - 1):
        codec.pack(runs[at : at + 1], one)
        assert np.array_equal(packed[at : at + 1], one)


@pytest.mark.parametrize("form", FORMS)
def test_memory_beside_the_runs_is_bounded(form: str) -> None:
    layout = BlockLayout(1, 8, 128, 16, "bfloat16", form)
    runs = np.zeros((512, layout.plain.run_bytes), np.uint8)  # 32 MiB
    packed = np.empty((512, layout.run_bytes), np.uint8)
    tracemalloc.start()
    try:
        Codec(layout).pack(runs, packed)
        Codec(layout).unpack(packed, runs)
        assert tracemalloc.get_traced_memory()[1] < 16 * CHUNK_ELEMENTS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("kind", "form"), EVERY)
@given(filled=st.integers(1, TOKENS))
@example(filled=TOKENS)
def test_what_lies_behind_a_tail_does_not_matter(kind: str, form: str, filled: int) -> None:
    codec, values = a_codec(kind, form), normal(1, kind)
    values[:, :, filled:] = np.nan
    run = runs_of(values, kind)
    codec.blank(run[0], filled)
    clean = values_of(run, kind)
    assert np.array_equal(clean[:, :, :filled], values[:, :, :filled])
    back = there_and_back(clean, kind, form)
    tail = a_layout(kind, form, filled)
    packed, alone = np.empty((1, tail.run_bytes), np.uint8), runs_of(values[:, :, :filled].copy(), kind)
    Codec(tail).pack(alone, packed)
    Codec(tail).unpack(packed, alone)
    assert np.array_equal(back[:, :, :filled], values_of(alone, kind, (2, filled, HEADS, DIM)))


@pytest.mark.parametrize(("kind", "form"), EVERY)
@given(seed=st.integers(0, 100))
def test_any_bytes_are_unpacked_without_a_word(kind: str, form: str, seed: int) -> None:
    layout = a_layout(kind, form)
    packed = np.random.default_rng(seed).integers(0, 256, (4, layout.run_bytes), dtype=np.uint8)
    a_codec(kind, form).unpack(packed, np.empty((4, layout.plain.run_bytes), np.uint8))


def test_a_byte_means_what_torch_means_by_float8_e4m3() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    assert np.array_equal(FP8, theirs, equal_nan=True)


def test_numbers_are_rounded_to_fp8_as_torch_rounds_them() -> None:
    """Values of one token whose greatest is 448 are their own shares of it."""
    layout = BlockLayout(1, 1, 4096, 1, "float32", "fp8")
    dice = np.random.default_rng(1)
    exact = FP8[np.isfinite(FP8)]
    ties = (np.sort(exact)[1:] + np.sort(exact)[:-1]) / 2
    spread = np.exp(dice.uniform(-12, 6.1, 4096 - 1 - len(exact) - len(ties))) * dice.choice([-1, 1])
    values = np.concatenate([[448.0], exact, ties, spread]).astype(np.float32)
    run = np.concatenate([np.zeros_like(values), values]).view(np.uint8)[None]
    packed, back = np.empty((1, layout.run_bytes), np.uint8), np.empty_like(run)
    Codec(layout).pack(run, packed)
    Codec(layout).unpack(packed, back)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn)
    assert np.array_equal(packed[0, -4096:], theirs.view(torch.uint8).numpy())
    assert np.array_equal(back.view(np.float32)[0, 4096:], theirs.to(torch.float32).numpy())


def test_the_gain_in_bytes() -> None:
    smollm = BlockLayout(30, 3, 64, 16, "bfloat16")
    packed = {form: replace(smollm, compression=form) for form in FORMS}
    assert {one.run_bytes for one in packed.values()} == {2 * 16 * 3 * 64 + 2 * (2 * 3 * 64 + 16 * 3)}
    assert packed["int8"].block_bytes / smollm.block_bytes == pytest.approx(0.570, abs=0.001)
    assert packed["int8"].plain == smollm
    wide = BlockLayout(30, 3, 64, 16, "float32", "fp8")
    assert wide.block_bytes / wide.plain.block_bytes == pytest.approx(0.320, abs=0.001)


def test_a_layout_that_is_not_compressed_has_no_codec() -> None:
    with pytest.raises(ValueError, match="not compressed"):
        Codec(a_layout("float32", "none"))


@pytest.mark.parametrize("form", FORMS)
def test_keys_with_outliers_lose_far_less_than_with_one_scale_a_token(form: str) -> None:
    """Why keys are told by channels: an outlier takes nothing from its neighbours."""
    values = normal(32, "float32")
    quiet: Any = np.s_[:, 0, :, :, 1::3]
    off = np.abs(there_and_back(values, "float32", form) - values)[quiet]
    by_token = 20 / (127 if form == "int8" else 448 / 8)
    assert off.mean() < by_token / 8
