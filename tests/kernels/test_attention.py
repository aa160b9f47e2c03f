"""Paged attention against the formula written out over a plain, unpaged context."""

import math

import pytest
import torch
from torch import Tensor

from kernels.attention import TILE, attend, causal_mask, halves, read_kv, write_kv, write_lines

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_formula(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Token by token, head by head, in float64."""
    tokens, context = queries.shape[0], keys.shape[0]
    output = torch.empty_like(queries)
    for token in range(tokens):
        seen = context - tokens + token + 1
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[:seen, kv_head].double() @ queries[token, head].double() / math.sqrt(DIM)
            output[token, head] = scores.softmax(0) @ values[:seen, kv_head].double()
    return output


@pytest.mark.parametrize(
    ("tokens", "context"),
    [(1, 1), (1, 37), (5, 5), (5, 90), (TILE, TILE), (TILE + 1, TILE + 1), (2 * TILE + 3, 3 * TILE), (2, TILE)],
)
def test_attend_equals_the_formula(tokens: int, context: int):
    queries = random(tokens, HEADS, DIM)
    keys, values = random(context, KV_HEADS, DIM, seed=1), random(context, KV_HEADS, DIM, seed=2)
    expected = by_formula(queries, keys, values)
    for spare in (0, 50):  # a mask made for a longer context does as well
        mask = causal_mask(HEADS // KV_HEADS, context + spare, torch.float32)
        assert torch.allclose(attend(queries, keys, values, mask), expected, atol=1e-5)


def test_a_single_query_needs_no_mask():
    queries, keys = random(1, HEADS, DIM), random(9, KV_HEADS, DIM, seed=1)
    assert torch.allclose(attend(queries, keys, keys, None), by_formula(queries, keys, keys), atol=1e-5)


def test_what_is_written_by_line_is_read_by_page():
    cache = torch.full((10, 2, BLOCK, KV_HEADS, DIM), float("nan"))
    pages, tokens = torch.tensor([7, 0, 3]), 10
    kv = random(tokens, 2, KV_HEADS, DIM)
    at = torch.arange(tokens)
    for part in (at[:6], at[6:]):  # two writes, the second from the middle of a block
        write_kv(cache, kv[part], write_lines(pages[part // BLOCK], part % BLOCK, BLOCK))
    keys, values = read_kv(cache, halves(pages), tokens)
    assert torch.equal(keys, kv[:, 0])
    assert torch.equal(values, kv[:, 1])


def test_a_write_touches_only_its_own_tokens():
    cache = torch.zeros(3, 2, BLOCK, KV_HEADS, DIM)
    write_kv(cache, torch.ones(1, 2, KV_HEADS, DIM), write_lines(torch.tensor([1]), torch.tensor([2]), BLOCK))
    assert cache[1, :, 2].eq(1).all()
    assert cache.sum() == 2 * KV_HEADS * DIM


def test_keys_of_other_pages_never_matter():
    """Memory that was never written may hold anything, NaN included."""
    cache = torch.full((4, 2, BLOCK, KV_HEADS, DIM), float("nan"))
    kv = random(6, 2, KV_HEADS, DIM)
    at = torch.arange(6)
    write_kv(cache, kv, write_lines(torch.tensor([2, 1])[at // BLOCK], at % BLOCK, BLOCK))
    mask = causal_mask(HEADS // KV_HEADS, 6, torch.float32)
    output = attend(random(6, HEADS, DIM), *read_kv(cache, halves(torch.tensor([2, 1])), 6), mask)
    assert output.isfinite().all()
