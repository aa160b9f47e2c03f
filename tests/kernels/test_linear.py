import pytest
import torch

from kernels.linear import linear, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("biased", [True, False])
def test_packed_or_not_the_product_is_the_same(dtype: torch.dtype, tokens: int, biased: bool):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((tokens, 48), (80, 48), (80,))
    )
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    with torch.inference_mode():
        for matrix in (weight, pack(weight)):
            product = linear(x, matrix, bias if biased else None)
            assert product.dtype == dtype
            unit = torch.finfo(dtype).eps  # the result is rounded to the type; the sum itself is in float32
            assert torch.allclose(product.double(), exact, rtol=2 * unit, atol=max(2 * unit, 2e-5))


def test_a_matrix_that_is_a_part_of_another_packs_as_well():
    whole = torch.randn(80, 96, generator=torch.Generator().manual_seed(0))
    x = torch.ones(1, 48)
    assert torch.allclose(linear(x, pack(whole[:, :48])), whole[:, :48].sum(1), atol=1e-4)
