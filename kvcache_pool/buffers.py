"""A caller's memory, seen as blocks: bytes of shape [layers, run_bytes], where they lie. Pure.

What a caller may hand in, for `count` blocks:

- a list or tuple with one buffer for each block;
- one array, tensor or buffer that holds them all, one after another.

A buffer is a numpy array, a torch tensor in CPU memory, or anything with the buffer protocol. Its elements are raw
bytes (uint8 or int8) or have the pool's KV type; bfloat16 may also come as uint16, since numpy has no name for it.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.blocks import BlockLayout

Bytes = npt.NDArray[np.uint8]

RAW = frozenset(("uint8", "int8"))
"""Element types that say nothing of what the bytes mean."""


def blocks_of(memory: object, layout: BlockLayout, count: int, *, writable: bool = False) -> list[Bytes]:
    """`count` blocks, each [layers, run_bytes].

    Without a copy, if each layer of each block is contiguous; what is to be read from is copied otherwise, what is
    to be written to (`writable`) is refused. Raises TypeError for what is no buffer or has other elements, and
    ValueError for another size, or for memory that cannot be written to.
    """
    if isinstance(memory, (list, tuple)):
        if len(memory) != count:
            raise ValueError(f"{count} blocks are named, and there is memory for {len(memory)}")
        return [_block(_raw(one, layout, writable), layout, writable) for one in memory]
    raw = _raw(memory, layout, writable)
    if raw.nbytes != count * layout.block_bytes:
        wanted = f"{count} blocks of {layout.block_bytes} bytes"
        raise ValueError(f"{wanted} are named, and the memory has {raw.nbytes} bytes")
    if raw.flags.c_contiguous:
        return list(raw.reshape(count, layout.layers, layout.run_bytes))
    if len(raw) != count:
        raise ValueError(f"memory of shape {raw.shape} is not contiguous, and its first dimension is not {count}")
    return [_block(one, layout, writable) for one in raw]


def _block(raw: Bytes, layout: BlockLayout, writable: bool) -> Bytes:
    """One block as [layers, run_bytes]."""
    if raw.nbytes != layout.block_bytes:
        raise ValueError(f"a block has {layout.block_bytes} bytes, not {raw.nbytes}")
    block = raw.reshape(layout.layers, layout.run_bytes)  # a copy, where it cannot be seen so
    if writable and not np.may_share_memory(block, raw):
        raise ValueError(f"memory of strides {raw.strides} cannot be written to layer by layer")
    return block


def _raw(memory: object, layout: BlockLayout, writable: bool) -> Bytes:
    """All bytes of one buffer, in its own shape but for the last dimension."""
    if hasattr(memory, "untyped_storage"):
        raw = _tensor(memory, layout, writable)
    else:
        array = _array(memory)
        _require_kind(array.dtype.name if array.dtype.isnative else str(array.dtype), layout)
        raw = _bytes(array, writable)
    if writable and not raw.flags.writeable:
        raise ValueError("the memory to read into is read-only")
    return raw


def _require_kind(kind: str, layout: BlockLayout) -> None:
    """Raises TypeError for elements of a type that the pool's blocks have not."""
    if kind not in RAW | {layout.kv_type} | ({"uint16"} if layout.kv_type == "bfloat16" else set()):
        raise TypeError(f"the pool's KV is {layout.kv_type}: its elements cannot be {kind}")


def _array(memory: object) -> npt.NDArray[Any]:
    if isinstance(memory, np.ma.MaskedArray):
        raise TypeError("a masked array has elements without a value: fill them first")
    if isinstance(memory, np.ndarray):
        return np.asarray(memory)  # of a subclass the plain array: it has memory of its own kind
    try:
        return np.asarray(memoryview(memory))  # type: ignore[arg-type]  # what is no buffer is told below
    except TypeError:
        kind = type(memory).__name__
        raise TypeError(f"a block is an array, a tensor or another buffer, not {kind}") from None


def _bytes(array: npt.NDArray[Any], writable: bool) -> Bytes:
    if array.ndim == 0:
        array = array.reshape(1)
    if array.strides[-1] != array.itemsize and array.size:
        if writable:
            raise ValueError(f"memory of strides {array.strides} cannot be written to: it is not contiguous")
        array = np.ascontiguousarray(array)
    return array.view(np.uint8)


def _tensor(tensor: Any, layout: BlockLayout, writable: bool) -> Bytes:
    """The bytes of a torch tensor. Whoever has one has torch: it is not imported here."""
    _require_kind(str(tensor.dtype).removeprefix("torch."), layout)
    if tensor.layout is not sys.modules["torch"].strided or tensor.is_nested or tensor.is_neg():
        raise TypeError("a tensor that is sparse, nested or a lazy view has no bytes to move: make it a plain one")
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} is out of reach: the pool moves CPU memory")
    flat = tensor.detach()
    if flat.dim() == 0 or (flat.stride(-1) != 1 and flat.numel()):
        if writable:
            raise ValueError(f"a tensor of strides {flat.stride()} cannot be written to: it is not contiguous")
        flat = flat.contiguous().reshape(-1)
    raw: Bytes = flat.view(sys.modules["torch"].uint8).numpy()
    return raw
