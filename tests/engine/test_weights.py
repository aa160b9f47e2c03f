"""Weights in memory: the same whichever file they come from (B17)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.checkpoint import open_checkpoint
from engine.checkpoint_gguf import TYPES
from engine.weights import Weights, load_weights
from tests.gguf_copy import gguf_copy
from tests.tiny import LLAMA3_ROPE, tiny_model


def loaded(path: Path) -> Weights:
    return load_weights(open_checkpoint(path), torch.float32)


def require_equal(one: Weights, other: Weights, tolerance: float = 0.0) -> None:
    """Every tensor, the layers' by name."""
    for name in ("embed", "norm", "head", "inverse_frequencies"):
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=tolerance, rtol=1e-6), name
    for layer, twin in zip(one.layers, other.layers, strict=True):
        for name, tensor in vars(layer).items():
            same = getattr(twin, name)
            assert (tensor is None) == (same is None), name
            assert tensor is None or torch.allclose(tensor, same, atol=tolerance, rtol=1e-6), name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_copy_has_the_folders_weights(tmp_path: Path, family: str, tied: bool):
    folder = tiny_model(tmp_path / "hf", family, tie_word_embeddings=tied)
    weights = loaded(gguf_copy(folder, tmp_path / "copy.gguf"))
    require_equal(weights, loaded(folder))
    assert (weights.head is weights.embed) == tied


def test_an_output_tensor_equal_to_the_embeddings_changes_nothing(tmp_path: Path):
    folder = tiny_model(tmp_path / "hf", tie_word_embeddings=True)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    require_equal(loaded(gguf_copy(folder, tmp_path / "a.gguf", tensors={"output.weight": embed})), loaded(folder))


def test_rope_factors_of_one_change_nothing(tmp_path: Path):
    folder = tiny_model(tmp_path / "hf")
    ones = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    require_equal(loaded(gguf_copy(folder, tmp_path / "a.gguf", tensors=ones)), loaded(folder))


def test_keys_with_defaults_may_be_missing(tmp_path: Path):
    folder = tiny_model(tmp_path / "hf", num_key_value_heads=6)
    removed = {"attention.head_count_kv": None, "attention.key_length": None, "rope.freq_base": None}
    require_equal(loaded(gguf_copy(folder, tmp_path / "a.gguf", fields=removed)), loaded(folder))


@pytest.mark.parametrize(("original_context", "theta"), [(64, 10000.0), (8192, 500000.0)])
def test_llama3_frequencies_equal_transformers_from_either_file(
    tmp_path: Path, original_context: int, theta: float
):
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": original_context, "rope_theta": theta}
    folder = tiny_model(tmp_path / "hf", rope_parameters=rope, head_dim=64)
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    for path in (folder, gguf_copy(folder, tmp_path / "copy.gguf")):
        assert torch.allclose(loaded(path).inverse_frequencies, reference, rtol=1e-6)


@pytest.mark.parametrize("type_", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_are_near_the_originals(tmp_path: Path, type_: str):
    folder = tiny_model(tmp_path / "hf")
    copy = loaded(gguf_copy(folder, tmp_path / "copy.gguf", type_=type_))
    # 4 bits over a block of 32 normal values of deviation 0.2: a step is about 0.06, an error at most half of it
    require_equal(copy, loaded(folder), tolerance=0.1 if type_.startswith("Q4") else 0.05)


def test_every_supported_quantisation_exists_in_the_library():
    assert set(TYPES) <= set(GGMLQuantizationType.__members__)


def test_weights_in_several_files(tmp_path: Path):
    folder = tiny_model(tmp_path)
    whole = loaded(folder)
    tensors = load_torch_file(folder / "model.safetensors")
    names, place = sorted(tensors), {}
    for part, own in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in own}, folder / f"part-{part}.safetensors")
        place |= dict.fromkeys(own, f"part-{part}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    require_equal(loaded(folder), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_but_the_frequencies_takes_the_asked_type(tmp_path: Path, dtype: torch.dtype):
    weights = load_weights(open_checkpoint(tiny_model(tmp_path, "qwen2")), dtype)
    found = [tensor for layer in weights.layers for tensor in vars(layer).values() if tensor is not None]
    assert {tensor.dtype for tensor in [weights.embed, weights.head, weights.norm, *found]} == {dtype}
    assert weights.inverse_frequencies.dtype == torch.float32
