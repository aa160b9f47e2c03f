"""Attention over paged KV: one layer's cache is pages, a request's context is a list of them.

    cache [pages, 2, block_tokens, kv_heads, head_dim]       2 = keys, values

Seen as lines of one token's keys or values, token t of a request whose pages are p lies at
`(2 * p[t // block_tokens] + kind) * block_tokens + t % block_tokens`, kind 0 for keys and 1 for values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64
"""Queries that go together. Each tile reads keys only up to its own last token, so a causal prefill does about
half the work; smaller tiles waste less and start more often. 64 was best or level from 512 to 2,048 tokens."""


def write_lines(pages: Tensor, offsets: Tensor, block_tokens: int) -> Tensor:
    """Where the keys and the values of tokens go: the lines for `write_kv`."""
    # pages, offsets [tokens] int64   -> [2 * tokens] int64: key line, value line of each token in turn
    keys = pages * (2 * block_tokens) + offsets
    return torch.stack((keys, keys + block_tokens), dim=1).flatten()


def write_kv(cache: Tensor, kv: Tensor, lines: Tensor) -> None:
    """Store new tokens' keys and values."""
    # cache [pages, 2, block_tokens, kv_heads, dim]   kv [tokens, 2, kv_heads, dim]   lines [2 * tokens]
    assert cache.is_contiguous()
    assert kv.shape[1:] == (2, *cache.shape[3:])
    assert lines.shape[0] == 2 * kv.shape[0]
    line = cache.shape[3] * cache.shape[4]
    cache.view(-1, line).index_copy_(0, lines, kv.reshape(-1, line))


def halves(pages: Tensor) -> Tensor:
    """The halves of pages that `read_kv` gathers: all keys in order, then all values."""
    # pages [n] int64   -> [2 * n] int64
    return torch.cat((2 * pages, 2 * pages + 1))


def read_kv(cache: Tensor, halves: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a request's first `tokens` tokens, gathered in order."""
    # cache [pages, 2, block_tokens, kv_heads, dim]   halves [2 * n]   -> 2 x [tokens, kv_heads, dim]
    pages, _, block_tokens, kv_heads, dim = cache.shape
    assert cache.is_contiguous()
    assert tokens <= halves.shape[0] // 2 * block_tokens
    gathered = cache.view(2 * pages, -1).index_select(0, halves)
    keys, values = gathered.view(2, -1, kv_heads, dim)
    return keys[:tokens], values[:tokens]


def causal_mask(group: int, context: int, dtype: torch.dtype) -> Tensor:
    """What the last TILE tokens of a context may not see, for `attend`: -inf there, else 0.

    A tile that ends earlier, or is shorter, uses the last columns and rows: the triangle is always at the end.
    """
    # -> [TILE * group, context]; rows go by token, then by head of the group
    tokens = torch.arange(context - TILE, context)
    hidden = torch.arange(context) > tokens[:, None]
    mask = torch.zeros(TILE, context, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(group, dim=0)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of a context's last tokens over the whole context.

    `mask` is a `causal_mask` of at least this context; None will do for a single query, which sees everything.
    """
    # queries [tokens, heads, dim]   keys, values [context, kv_heads, dim]   -> like queries
    tokens, heads, _ = queries.shape
    context, kv_heads, _ = keys.shape
    assert tokens <= context
    assert heads % kv_heads == 0
    assert values.shape == keys.shape
    if tokens == 1:
        return _attend_tile(queries, keys, values, None)
    assert mask is not None
    assert mask.shape[1] >= context
    group, outputs = heads // kv_heads, []
    for start in range(0, tokens, TILE):
        end = min(start + TILE, tokens)
        seen = context - tokens + end
        corner = mask[mask.shape[0] - (end - start) * group :, mask.shape[1] - seen :]
        outputs.append(_attend_tile(queries[start:end], keys[:seen], values[:seen], corner))
    return torch.cat(outputs)


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The heads that share a KV head become more queries of it, so that keys and values are never repeated."""
    # queries [tokens, heads, dim]   keys, values [seen, kv_heads, dim]   mask [tokens * group, seen]
    tokens, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.view(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    output = F.scaled_dot_product_attention(
        grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask
    )
    return output.view(kv_heads, tokens, -1, dim).transpose(0, 1).reshape(tokens, heads, dim)
