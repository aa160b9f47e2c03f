"""The gated activation of the feed-forward part."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where each row holds gate, then up."""
    # gate_up [tokens, 2 * intermediate]   -> [tokens, intermediate]
    assert gate_up.shape[-1] % 2 == 0
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
