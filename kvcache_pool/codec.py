"""Runs in fewer bytes: one byte for each element of KV, and the scales that it takes to read them. Pure.

    plain   [2, block_tokens, kv_heads, head_dim] of kv_type                    2 = keys, values
    packed  least and greatest key     kv_type [2, kv_heads, head_dim]          over the block's tokens
            greatest value             kv_type [block_tokens, kv_heads]         over the head, without its sign
            elements                   bytes   [2, block_tokens, kv_heads, head_dim]

Some channels of keys are far from zero in all tokens, and those of values are not: so a key is told by where it
lies between the extremes of its channel, a value by its share of the largest of its token's head. Between them

    int8    lie equal steps: 255 from the least to the greatest key, 127 from zero to the greatest value
    fp8     lie the numbers of float8 e4m3: many about the middle (keys) or zero (values), few far out

Extremes are elements themselves, so kv_type holds them exactly and they come back as they were: KV that was
unpacked and is packed again loses nothing more, but what float32 rounds.
"""

import numpy as np
import numpy.typing as npt

from kvcache_pool.api import NotFinite
from protocol.blocks import BlockLayout

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CHUNK_ELEMENTS = 1 << 17
"""Worked on at once: as float32 half a megabyte, which stays in a core's own cache."""

KEY_STEPS, VALUE_STEPS = 255, 127
FP8_MAX = 448
"""The greatest finite number of e4m3."""

STEP_MIN = np.float32(2.0**-126)
"""Smaller steps have no finite inverse: elements that differ by less all become one."""


class Codec:
    """Packs and unpacks the runs of one layout, many at once. Holds nothing else; may be used from any thread."""

    def __init__(self, layout: BlockLayout) -> None:
        """`layout` is compressed. Raises ValueError if it is not."""
        if layout.compression == "none":
            raise ValueError("there is nothing to pack: the layout is not compressed")
        self._fp8 = layout.compression == "fp8"
        self._kind = np.dtype(np.uint16 if layout.kv_type == "bfloat16" else layout.kv_type)
        self._tokens, self._heads, self._dim = layout.block_tokens, layout.kv_heads, layout.head_dim
        self._channels = layout.kv_heads * layout.head_dim
        self._half = layout.block_tokens * self._channels
        self._scales = layout.scales
        self._chunk = max(1, CHUNK_ELEMENTS // (2 * self._half))

    def pack(self, runs: Bytes, out: Bytes) -> None:
        """`runs` [n, plain run_bytes] into `out` [n, packed run_bytes]; rows are contiguous in both.

        int8: a key comes back off by at most half a 255th of its channel's extent in this block, a value by half a
        127th of its token's greatest. fp8: off by a 16th of its distance from the middle or from zero; where that
        is small, by 2**-10 / 448 of the greatest distance. Raises NotFinite; `out` is then garbage.
        """
        work = np.empty((min(self._chunk, len(runs)), 2, self._half), np.float32)
        spare = np.empty_like(work[:, 0])
        with np.errstate(all="ignore"):
            for start in range(0, len(runs), self._chunk):
                part = slice(start, start + self._chunk)
                count = len(runs[part])
                _widen(runs[part].view(self._kind).reshape(count, 2, self._half), work[:count])
                self._pack(work[:count], spare[:count], out[part])

    def unpack(self, packed: Bytes, out: Bytes) -> None:
        """`packed` [n, packed run_bytes] into `out` [n, plain run_bytes]; rows are contiguous in both. Any bytes
        give some values."""
        work = np.empty((min(self._chunk, len(packed)), 2, self._half), np.float32)
        with np.errstate(all="ignore"):
            for start in range(0, len(packed), self._chunk):
                part = slice(start, start + self._chunk)
                count = len(packed[part])
                self._unpack(packed[part], work[:count])
                _narrow(work[:count], out[part].view(self._kind).reshape(count, 2, self._half))

    def blank(self, run: Bytes, filled: int) -> None:
        """Let a run say nothing of the tokens after the first `filled`, of which there is one at least: what lies
        there is not of this block, and would stretch its scales."""
        keys, values = run.view(self._kind).reshape(2, self._tokens, self._channels)
        keys[filled:] = keys[0]
        values[filled:] = 0

    def _pack(self, work: Floats, spare: Floats, out: Bytes) -> None:
        """`work` [n, 2, half] is used up; `spare` [n, half] is room."""
        count = len(work)
        keys = work[:, 0].reshape(count, self._tokens, self._channels)
        values = work[:, 1].reshape(count, self._tokens * self._heads, self._dim)
        least, greatest = keys.min(1), keys.max(1)
        top = np.abs(values, out=spare.reshape(values.shape)).max(2)
        if not (np.isfinite(greatest - least).all() and np.isfinite(top).all()):
            raise NotFinite("KV that is not finite cannot be compressed")
        scales, elements = self._parts(out)
        for extreme, into in zip((least, greatest, top), scales, strict=True):
            _narrow(extreme.copy(), into)
        if self._fp8:
            keys -= _middle(least, greatest)[:, None]
            keys *= _inverse(_key_steps(least, greatest, 2 * FP8_MAX))[:, None]
            values *= _inverse(top / FP8_MAX)[..., None]
            _to_fp8(work[:, 0], spare, elements[:, 0])
            _to_fp8(work[:, 1], spare, elements[:, 1])
        else:
            keys -= least[:, None]
            keys *= _inverse(_key_steps(least, greatest, KEY_STEPS))[:, None]
            values *= _inverse(top / VALUE_STEPS)[..., None]
            np.rint(work, out=work)
            np.copyto(elements[:, 0], work[:, 0], casting="unsafe")
            np.copyto(elements[:, 1].view(np.int8), work[:, 1], casting="unsafe")

    def _unpack(self, packed: Bytes, work: Floats) -> None:
        count = len(packed)
        scales, elements = self._parts(packed)
        least, greatest, top = (_widened(part) for part in scales)
        keys = work[:, 0].reshape(count, self._tokens, self._channels)
        values = work[:, 1].reshape(count, self._tokens * self._heads, self._dim)
        if self._fp8:
            np.take(FP8, elements, out=work, mode="clip")
            keys *= _key_steps(least, greatest, 2 * FP8_MAX)[:, None]
            keys += _middle(least, greatest)[:, None]
            values *= (top / FP8_MAX)[..., None]
        else:
            np.copyto(work[:, 0], elements[:, 0])
            np.copyto(work[:, 1], elements[:, 1].view(np.int8))
            keys *= _key_steps(least, greatest, KEY_STEPS)[:, None]
            keys += least[:, None]
            values *= (top / VALUE_STEPS)[..., None]

    def _parts(self, packed: Bytes) -> tuple[list[npt.NDArray[np.generic]], Bytes]:
        """Of packed runs: the scales in kv_type (least and greatest keys [n, channels], greatest values
        [n, tokens * heads]), and the elements [n, 2, half]."""
        end = self._scales * self._kind.itemsize
        scales = packed[:, :end].view(self._kind)
        one, two = self._channels, 2 * self._channels
        elements = packed[:, end:].reshape(len(packed), 2, self._half, copy=False)
        return [scales[:, :one], scales[:, one:two], scales[:, two:]], elements


def _key_steps(least: Floats, greatest: Floats, count: int) -> Floats:
    return (greatest - least) * np.float32(1 / count)


def _middle(least: Floats, greatest: Floats) -> Floats:
    return least + (greatest - least) * np.float32(0.5)


def _inverse(steps: Floats) -> Floats:
    return np.where(steps < STEP_MIN, np.float32(0), np.float32(1) / steps)


def _widened(numbers: npt.NDArray[np.generic]) -> Floats:
    wide = np.empty(numbers.shape, np.float32)
    _widen(numbers, wide)
    return wide


def _widen(numbers: npt.NDArray[np.generic], out: Floats) -> None:
    """As float32. What is uint16 is bfloat16: the upper half of a float32."""
    if numbers.dtype == np.uint16:
        bits = out.view(np.uint32)
        np.copyto(bits, numbers)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, numbers)


def _narrow(numbers: Floats, out: npt.NDArray[np.generic]) -> None:
    """The way back, to the nearest; `numbers` is used up."""
    if out.dtype == np.uint16:
        bits = numbers.view(np.uint32)
        np.add(bits, 0x8000, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out, bits, casting="unsafe")
    else:
        np.copyto(out, numbers, casting="same_kind")


def _to_fp8(numbers: Floats, spare: Floats, out: Bytes) -> None:
    """The nearest e4m3, ties to even, of numbers of at most FP8_MAX; they are used up.

    Their upper halves are looked up. The last bit there is set if anything was below it, so that what is no tie
    does not become one.
    """
    bits, more = numbers.view(np.uint32), spare.view(np.uint32)
    np.bitwise_and(bits, 0xFFFF, out=more)
    more += 0xFFFF
    bits |= more
    bits >>= 16
    np.copyto(out, np.take(NEAREST_FP8, bits, mode="clip"))


def _fp8_numbers() -> Floats:
    """What each byte means as e4m3: a sign, four bits of exponent, three of mantissa; all ones is NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


FP8 = _fp8_numbers()


def _nearest_fp8() -> Bytes:
    """The byte for each upper half of a float32 in the order of their bits, 65,536 in all; ties go to even."""
    size = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)
    finite = FP8[:127]
    ties = (finite[1:] + finite[:-1]) / 2
    below, above = np.searchsorted(ties, size, "left"), np.searchsorted(ties, size, "right")
    nearest = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return np.concatenate([nearest, nearest | 128])


NEAREST_FP8 = _nearest_fp8()
