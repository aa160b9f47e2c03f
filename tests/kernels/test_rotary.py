import math

import torch

from kernels.rotary import rotary_table, rotate

FREQUENCIES = torch.tensor([1.0, 0.1])


def rotated(x: torch.Tensor, *positions: int) -> torch.Tensor:
    return rotate(x, rotary_table(torch.tensor(positions), FREQUENCIES))


def test_position_zero_turns_nothing():
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotated(x, 0), x)


def test_pairs_are_halves_of_a_head_and_turn_at_their_own_speed():
    x = torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])
    expected = torch.tensor([[[math.cos(3), math.cos(0.3), math.sin(3), math.sin(0.3)]]])
    assert torch.allclose(rotated(x, 3), expected)


def test_a_product_depends_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 4, generator=generator), torch.randn(1, 1, 4, generator=generator)
    near = (rotated(q, 7) * rotated(k, 2)).sum()
    far = (rotated(q, 1007) * rotated(k, 1002)).sum()
    assert torch.allclose(near, far, atol=1e-4)


def test_angles_are_computed_in_float32_whatever_the_type():
    x = torch.ones(1, 1, 4)
    at = 5003
    assert torch.allclose(rotated(x.bfloat16(), at).float(), rotated(x, at), atol=2**-7)
