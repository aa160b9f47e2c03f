"""Memory of any kind is seen as blocks where it lies, and what is none is refused in words."""

from array import array

import numpy as np
import pytest
import torch

from kvcache_pool.buffers import blocks_of
from protocol.blocks import BlockLayout

LAYOUT = BlockLayout(layers=3, kv_heads=2, head_dim=4, block_tokens=2, kv_type="float16")
SHAPE = (LAYOUT.layers, 2, LAYOUT.block_tokens, LAYOUT.kv_heads, LAYOUT.head_dim)
BFLOAT16 = BlockLayout(layers=3, kv_heads=2, head_dim=4, block_tokens=2, kv_type="bfloat16")


def some(count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float16]]":
    return np.arange(count * LAYOUT.block_bytes // 2, dtype=np.float16).reshape(count, *SHAPE)


@pytest.mark.parametrize(
    "memory",
    [
        some(2),
        some(2).reshape(-1),
        some(2).view(np.uint8),
        bytearray(some(2).tobytes()),
        memoryview(bytearray(some(2).tobytes())),
        array("b", some(2).tobytes()),
        torch.from_numpy(some(2)),
        [*some(2)],
        [some(2)[0], torch.from_numpy(some(2)[1].copy())],
        [bytearray(some(2)[0].tobytes()), some(2)[1]],
    ],
    ids=lambda memory: type(memory).__name__,
)
def test_what_is_written_to_a_block_lies_in_the_callers_memory(memory: object) -> None:
    blocks = blocks_of(memory, LAYOUT, 2, writable=True)
    assert [block.shape for block in blocks] == [(3, LAYOUT.run_bytes)] * 2
    assert [block.tobytes() for block in blocks] == [row.tobytes() for row in some(2)]
    blocks[1][:] = 7
    again = blocks_of(memory, LAYOUT, 2)
    assert again[1].tobytes() == b"\7" * LAYOUT.block_bytes
    assert again[0].tobytes() == some(2)[0].tobytes()


def test_blocks_of_an_engines_pages_are_not_copied_though_their_layers_lie_apart() -> None:
    pages = np.zeros((LAYOUT.layers, 5, *SHAPE[1:]), np.float16)  # [layers, pages, ...], as engines keep them
    for memory in ([pages[:, 3], pages[:, 1]], torch.from_numpy(pages)[:, [3, 1]].movedim(1, 0)):
        assert len(blocks_of(memory, LAYOUT, 2)) == 2
    blocks = blocks_of([pages[:, 3], pages[:, 1]], LAYOUT, 2, writable=True)
    blocks[0][:] = 60
    assert (pages[:, 3].view(np.uint8) == 60).all()
    assert not pages[:, [0, 1, 2, 4]].any()
    whole = blocks_of(pages.transpose(1, 0, 2, 3, 4, 5), LAYOUT, 5, writable=True)
    assert np.shares_memory(whole[4], pages)


def test_what_lies_in_pieces_is_copied_to_read_and_refused_to_write() -> None:
    turned = some(1)[0].transpose(0, 1, 3, 2, 4)  # heads before tokens: the caller's order of bytes counts
    apart = np.zeros((1, LAYOUT.block_bytes * 2), np.uint8)[:, ::2]
    tensor = torch.zeros(LAYOUT.block_bytes, 2, dtype=torch.uint8)[:, 0]
    assert blocks_of([turned], LAYOUT, 1)[0].tobytes() == turned.tobytes()
    assert blocks_of(apart, LAYOUT, 1)[0].tobytes() == bytes(LAYOUT.block_bytes)
    assert blocks_of([tensor], LAYOUT, 1)[0].tobytes() == bytes(LAYOUT.block_bytes)
    for memory in ([turned], apart, [tensor]):
        with pytest.raises(ValueError, match="cannot be written to"):
            blocks_of(memory, LAYOUT, 1, writable=True)


def test_bfloat16_comes_from_torch_or_as_numpys_uint16() -> None:
    tensor = torch.randn(2, *SHAPE).to(torch.bfloat16).requires_grad_()
    blocks = blocks_of(tensor, BFLOAT16, 2, writable=True)
    assert blocks[1].tobytes() == tensor.detach()[1].view(torch.uint8).numpy().tobytes()
    assert len(blocks_of(np.zeros((2, *SHAPE), np.uint16), BFLOAT16, 2)) == 2
    with pytest.raises(TypeError, match="the pool's KV is float16: its elements cannot be uint16"):
        blocks_of(np.zeros((2, *SHAPE), np.uint16), LAYOUT, 2)
    with pytest.raises(TypeError, match="the pool's KV is float16: its elements cannot be bfloat16"):
        blocks_of(tensor, LAYOUT, 2)


@pytest.mark.parametrize(
    ("memory", "error", "sentence"),
    [
        (some(3), ValueError, "2 blocks of 192 bytes are named, and the memory has 576 bytes"),
        ([*some(3)], ValueError, "2 blocks are named, and there is memory for 3"),
        ([some(1)[0], some(1)[0][:2]], ValueError, "a block has 192 bytes, not 128"),
        (some(2).astype(np.float32)[:1], TypeError, "float16: its elements cannot be float32"),
        ([[1.0, 2.0], [3.0, 4.0]], TypeError, "a block is an array, a tensor or another buffer, not list"),
        (17, TypeError, "not int"),
        (
            torch.zeros(2, *SHAPE, dtype=torch.float16, device="meta"),
            ValueError,
            "a tensor on meta is out of reach",
        ),
        (some(4).reshape(-1, 4)[:, :2], ValueError, "is not contiguous, and its first dimension is not 2"),
        (some(2).astype(">f2"), TypeError, "float16: its elements cannot be >f2"),
        (np.array([object()] * 2), TypeError, "float16: its elements cannot be object"),
        (np.ma.masked_array(some(2)), TypeError, "a masked array has elements without a value"),
        (torch.from_numpy(some(2)).to_sparse(), TypeError, "sparse, nested or a lazy view"),
        (torch._neg_view(torch.from_numpy(some(2))), TypeError, "sparse, nested or a lazy view"),
    ],
)
def test_other_memory_is_refused_in_words(memory: object, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        blocks_of(memory, LAYOUT, 2)


@pytest.mark.parametrize(
    "memory", [some(2).tobytes(), np.broadcast_to(some(1)[0], (2, *SHAPE))], ids=["bytes", "view"]
)
def test_what_is_read_only_is_not_read_into(memory: object) -> None:
    assert len(blocks_of(memory, LAYOUT, 2)) == 2
    with pytest.raises(ValueError, match="read-only"):
        blocks_of(memory, LAYOUT, 2, writable=True)
