import math

import torch

from kernels.activation import swiglu


def test_gate_comes_first():
    gate, up = 1.5, -2.0
    silu = gate / (1 + math.exp(-gate))
    assert torch.allclose(swiglu(torch.tensor([[gate, 0.0, up, 3.0]])), torch.tensor([[silu * up, 0.0]]))
