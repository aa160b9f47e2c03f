import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.norm import rms_norm


def test_rows_get_a_root_mean_square_of_one():
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)) * 7
    assert torch.allclose(rms_norm(x, torch.ones(32), 0.0).square().mean(-1), torch.ones(5), atol=1e-5)


def test_equals_transformers_in_every_type():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(1)
        x, weight = (
            torch.randn(5, 32, generator=generator).to(dtype),
            torch.randn(32, generator=generator).to(dtype),
        )
        reference = LlamaRMSNorm(32, eps=1e-5).to(dtype)
        reference.weight.data = weight
        assert torch.equal(rms_norm(x, weight, 1e-5), reference(x))
