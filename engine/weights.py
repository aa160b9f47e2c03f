"""Weights: a checkpoint's tensors in memory, in the shapes that the model multiplies with."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import safe_open
from torch import Tensor

from engine.architecture import (
    EMBED,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
    Architecture,
    Llama3Scaling,
    StoredTensor,
    layer_tensor,
)
from engine.checkpoint import Checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. q, k, v are stacked into one matrix, gate and up into another: one product each."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    out: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True)
class Weights:
    """A whole model. `head` is `embed` itself if the two are tied."""

    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]
    inverse_frequencies: Tensor  # [head_dim / 2] float32, radians a token


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Weights:
    """Read every tensor, dequantise, convert to `dtype`. Raises OSError."""
    read, stored, architecture = _reader(checkpoint), checkpoint.tensors, checkpoint.architecture

    def get(name: str) -> Tensor:
        return read(stored[name]).to(dtype)

    embed = get(EMBED)
    factors = read(stored[ROPE_FACTORS]).float() if architecture.rope_factors else None
    return Weights(
        embed=embed,
        layers=[_layer(architecture, layer, get) for layer in range(architecture.layers)],
        norm=get(FINAL_NORM),
        head=embed if architecture.tied else get(HEAD),
        inverse_frequencies=_inverse_frequencies(architecture, factors),
    )


def _layer(architecture: Architecture, layer: int, get: Callable[[str], Tensor]) -> LayerWeights:
    def of(name: str) -> Tensor:
        return get(layer_tensor(layer, name))

    def stacked(names: tuple[str, ...], kind: str) -> Tensor:
        return torch.cat([of(f"{name}.{kind}") for name in names])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    normed = architecture.qk_norm
    return LayerWeights(
        attention_norm=of("input_layernorm.weight"),
        qkv=stacked(qkv, "weight"),
        qkv_bias=stacked(qkv, "bias") if architecture.qkv_bias else None,
        q_norm=of("self_attn.q_norm.weight") if normed else None,
        k_norm=of("self_attn.k_norm.weight") if normed else None,
        out=of("self_attn.o_proj.weight"),
        mlp_norm=of("post_attention_layernorm.weight"),
        gate_up=stacked(("mlp.gate_proj", "mlp.up_proj"), "weight"),
        down=of("mlp.down_proj.weight"),
    )


Read = Callable[[StoredTensor], Tensor]


def _reader(checkpoint: Checkpoint) -> Read:
    """How to read one stored tensor, in any float type."""
    if checkpoint.format == "safetensors":
        files = {path: safe_open(path, framework="pt") for path in {t.path for t in checkpoint.tensors.values()}}
        return lambda stored: files[stored.path].get_tensor(stored.name)  # type: ignore[no-untyped-call]
    data = np.memmap(checkpoint.path, dtype=np.uint8, mode="r")
    return lambda stored: _read_gguf(checkpoint.architecture, data, stored)


def _read_gguf(architecture: Architecture, data: npt.NDArray[np.uint8], stored: StoredTensor) -> Tensor:
    """Dequantised to float32."""
    raw = data[stored.offset : stored.offset + stored.bytes]
    values = dequantize(raw.reshape(*stored.shape[:-1], -1), GGMLQuantizationType[stored.type])
    tensor = torch.from_numpy(np.require(values, requirements=["W"]))
    kind = stored.name.rpartition(".")[0].rpartition(".")[2]
    if architecture.family == "llama" and kind in ("attn_q", "attn_k"):
        return _halves(tensor, architecture.heads if kind == "attn_q" else architecture.kv_heads)
    return tensor


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's order of rotary rows for llama: pairs side by side there, in two halves of a head here.

    GGUF:  a0 b0 a1 b1 ...        ours:  a0 a1 ... b0 b1 ...        (a, b) turn together
    """
    return weight.reshape(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _inverse_frequencies(architecture: Architecture, factors: Tensor | None) -> Tensor:
    """Radians a token of each rotary pair, float32 [head_dim / 2]."""
    steps = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    plain = 1.0 / architecture.rope_theta**steps
    if factors is not None:
        return plain / factors
    return plain if architecture.rope_scaling is None else _llama3(plain, architecture.rope_scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow down long wavelengths, keep short ones, and in between mix by how often one fits the old context."""
    turns = scaling.original_context * plain / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain
