"""Rotary positions: each pair of a head's elements is turned by an angle that grows with the position."""

import torch
from torch import Tensor


def rotary_table(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles, in float32."""
    # positions [tokens] int64   inverse_frequencies [dim / 2] float32   -> 2 x [tokens, dim / 2]
    assert inverse_frequencies.dtype == torch.float32
    angles = positions[:, None].float() * inverse_frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn every head of every token; the pair of element i of the first half is i of the second."""
    # x [tokens, heads, dim]   table 2 x [tokens, dim / 2]   -> like x
    cos, sin = (part[:, None] for part in table)
    assert x.shape[0] == cos.shape[0]
    assert x.shape[-1] == 2 * cos.shape[-1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
