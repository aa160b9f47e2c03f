"""The model family as a decoder that runs layer by layer over the tokens of many requests at once.

    embed(tokens) -> x        x = layer(0, x), layer(1, x), ...        head(x of the last tokens) -> logits

Tokens of all rows of a pass lie end to end; only attention knows where a row begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.api import Row
from engine.architecture import Architecture
from engine.weights import LayerWeights, Weights
from kernels.activation import swiglu
from kernels.attention import attend, causal_mask, halves, read_kv, write_kv, write_lines
from kernels.linear import linear, pack
from kernels.norm import rms_norm
from kernels.rotary import rotary_table, rotate


@dataclass(frozen=True)
class Span:
    """One row's tokens within the batch, and its context within the cache."""

    begin: int
    end: int
    context: int
    halves: Tensor  # [2 * pages]


@dataclass(frozen=True)
class Batch:
    """What every layer of one pass needs to know, computed once."""

    tokens: Tensor  # [tokens] int64
    table: tuple[Tensor, Tensor]  # 2 x [tokens, head_dim / 2] float32
    lines: Tensor  # [2 * tokens] int64
    spans: list[Span]
    mask: Tensor | None  # [tile * group, longest context of a row of several tokens]


class Model:
    """Weights and arithmetic. Holds no state between passes: the KV cache is the caller's."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self.architecture = architecture
        self.weights = replace(weights, layers=[_packed(layer) for layer in weights.layers])

    def batch(self, rows: Sequence[Row], block_tokens: int) -> Batch:
        """Lay the rows' tokens end to end."""
        assert rows, "a batch has tokens"
        spans, positions, begin = [], [], 0
        pages, places = [], []
        for row in rows:
            end, context = begin + len(row.tokens), row.start + len(row.tokens)
            own = torch.tensor(row.pages[: -(-context // block_tokens)])
            where = torch.arange(row.start, context)
            positions.append(where)
            pages.append(own[where // block_tokens])
            places.append(where % block_tokens)
            spans.append(Span(begin, end, context, halves(own)))
            begin = end
        where = torch.cat(positions)
        widest = max((span.context for span in spans if span.end - span.begin > 1), default=0)
        arch = self.architecture
        group, dtype = arch.heads // arch.kv_heads, self.weights.embed.dtype
        return Batch(
            tokens=torch.tensor([token for row in rows for token in row.tokens]),
            table=rotary_table(where, self.weights.inverse_frequencies),
            lines=write_lines(torch.cat(pages), torch.cat(places), block_tokens),
            spans=spans,
            mask=causal_mask(group, widest, dtype) if widest else None,
        )

    def embed(self, batch: Batch) -> Tensor:
        """What enters layer 0, [tokens, hidden]."""
        return F.embedding(batch.tokens, self.weights.embed)

    def layer(self, layer: int, x: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        """One decoder layer; writes the tokens' keys (rotated) and values into `cache`, that layer's pages."""
        # x [tokens, hidden]   cache [pages, 2, block_tokens, kv_heads, head_dim]   -> like x
        weights, eps = self.weights.layers[layer], self.architecture.norm_eps
        x = x + self._attention(layer, rms_norm(x, weights.attention_norm, eps), cache, batch)
        gate_up = linear(rms_norm(x, weights.mlp_norm, eps), weights.gate_up)
        return x + linear(swiglu(gate_up), weights.down)

    def head(self, x: Tensor) -> Tensor:
        """Logits of the tokens in `x`, float32 [tokens, vocab]."""
        return F.linear(rms_norm(x, self.weights.norm, self.architecture.norm_eps), self.weights.head).float()

    def _attention(self, layer: int, x: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        weights, arch = self.weights.layers[layer], self.architecture
        parts = linear(x, weights.qkv, weights.qkv_bias).view(x.shape[0], -1, arch.head_dim)
        queries, keys, values = parts.split((arch.heads, arch.kv_heads, arch.kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = (
                rms_norm(queries, weights.q_norm, arch.norm_eps),
                rms_norm(keys, weights.k_norm, arch.norm_eps),
            )
        queries, keys = rotate(queries, batch.table), rotate(keys, batch.table)
        write_kv(cache, torch.stack((keys, values), dim=1), batch.lines)
        outputs = [
            attend(queries[span.begin : span.end], *read_kv(cache, span.halves, span.context), batch.mask)
            for span in batch.spans
        ]
        return linear(torch.cat(outputs).view(x.shape[0], -1), weights.out)


def _packed(layer: LayerWeights) -> LayerWeights:
    """The layer with its matrices ready for `linear`. The embedding stays plain: its rows are also looked up."""
    matrices = {name: pack(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
    return replace(layer, **matrices)
