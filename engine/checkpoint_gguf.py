"""GGUF: what a file's fields and tensor names mean for the model family."""

import re
from collections.abc import Callable
from typing import Any

from engine.architecture import (
    EMBED,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
    Architecture,
    StoredTensor,
    UnsupportedModel,
    layer_tensor,
)
from engine.gguf_file import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral files call themselves llama: the two differ in nothing that is supported here."""

TYPES = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),
)

_NAMES = {
    "token_embd.weight": EMBED,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "rope_freqs.weight": ROPE_FACTORS,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """The file's tensors by Hugging Face's names. Raises UnsupportedModel for a quantisation we cannot read."""
    for name, tensor in file.tensors.items():
        if tensor.type not in TYPES:
            raise UnsupportedModel(f"{file.path.name}: {name} has the unsupported quantisation {tensor.type}")
    return {_canonical(name): tensor for name, tensor in file.tensors.items()}


def gguf_architecture(file: GgufFile, tensors: dict[str, StoredTensor]) -> Architecture:
    """What the fields say. Raises UnsupportedModel."""
    family = file.fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise UnsupportedModel(f"{file.path.name}: architecture {family!r}; supported: {ARCHITECTURES}")
    get = _getter(file, family)
    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    _refuse_variants(get, head_dim)
    if EMBED not in tensors:
        raise UnsupportedModel(f"{file.path.name} has no token_embd.weight")
    return Architecture(
        family=family,
        layers=get("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=get("feed_forward_length"),
        vocab=tensors[EMBED].shape[0],
        context_tokens=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=None,
        rope_factors=ROPE_FACTORS in tensors,
        tied=HEAD not in tensors,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _canonical(name: str) -> str:
    """Hugging Face's name for a tensor; a name that we do not know stays, to be refused with the rest."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER_NAMES:
        return layer_tensor(int(match[1]), f"{_LAYER_NAMES[match[2]]}.{match[3]}")
    return _NAMES.get(name, name)


def _getter(file: GgufFile, family: str) -> Callable[..., Any]:
    """A function that reads `family.key`: the value, else the default, else a refusal."""

    def get(key: str, *default: Any) -> Any:
        value = file.fields.get(f"{family}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{file.path.name}: {family}.{key} differs from layer to layer")
            value = value[0]
        if value is None:
            if not default:
                raise UnsupportedModel(f"{file.path.name}: the field {family}.{key} is missing")
            return default[0]
        return value

    return get


def _refuse_variants(get: Callable[..., Any], head_dim: int) -> None:
    """Refuse by name what the fields can ask for beyond the family."""
    scaling = get("rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModel(f"rope scaling {scaling!r} is not supported")
    if get("rope.scale_linear", 1.0) != 1.0:
        raise UnsupportedModel("rope scaling 'linear' is not supported")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("partial rotary positions are not supported")
    if get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("values of another head size than keys are not supported")
    if get("expert_count", 0):
        raise UnsupportedModel("mixture-of-experts models are not supported")
    window, context = get("attention.sliding_window", None), get("context_length")
    if window and window < context:
        raise UnsupportedModel(f"sliding-window attention ({window} of {context} tokens) is not supported")
