"""Hugging Face folders: what config.json means for the model family, and where the safetensors lie."""

import json
from pathlib import Path
from typing import Any

from engine.architecture import FAMILIES, HEAD, Architecture, Llama3Scaling, StoredTensor, UnsupportedModel

TYPES = ("F32", "F16", "BF16")
_HEADER_BYTES_MAX = 100_000_000
"""The safetensors format's own limit."""
_HEAD_DIM_DEFAULT = {"qwen3": 128}
_WINDOW_DEFAULT = {"mistral": 4096}
"""Where a family's configuration class has another default than what the rest of the file implies."""


def hf_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The folder's tensors by name. Raises UnsupportedModel."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise UnsupportedModel(f"{folder.name} holds no .safetensors file")
    found: dict[str, StoredTensor] = {}
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
            raise UnsupportedModel(f"{folder.name}: {name} of {index.name} is missing")
        found |= _read_safetensors(folder / name)
    return {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}


def hf_architecture(folder: Path, tensors: dict[str, StoredTensor]) -> Architecture:
    """What config.json says. Raises UnsupportedModel."""
    config = _read_json(folder / "config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"{folder.name}: architecture {family!r}; supported: {FAMILIES}")
    _refuse_variants(config, family)
    theta, scaling = _rope(config)
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    tied = bool(config.get("tie_word_embeddings", False))
    if tied:
        tensors.pop(HEAD, None)  # some writers store the shared matrix under both names
    return Architecture(
        family=family,
        layers=_need(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads") or heads,
        head_dim=_whole(config, "head_dim") or _HEAD_DIM_DEFAULT.get(family, hidden // max(heads, 1)),
        intermediate=_need(config, "intermediate_size"),
        vocab=_need(config, "vocab_size"),
        context_tokens=_need(config, "max_position_embeddings"),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_factors=False,
        tied=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _need(config: dict[str, Any], key: str) -> int:
    value = _whole(config, key)
    if value is None:
        raise UnsupportedModel(f"config.json: {key} is missing")
    return value


def _whole(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and type(value) is not int:
        raise UnsupportedModel(f"config.json: {key} must be a whole number, not {value!r:.40}")
    return value


def _number(config: dict[str, Any], key: str, default: float) -> float:
    """`default` for a value that is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise UnsupportedModel(f"config.json: {key} must be a number, not {value!r:.40}")
    return float(value)


def _rope(config: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial rotary positions are not supported")
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values()):
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise UnsupportedModel(f"config.json: rope scaling 'llama3' without {missing[0]}")
    factor, low, high, original = (_number(rope, key, 0.0) for key in keys)
    return theta, Llama3Scaling(factor, low, high, int(original))


def _refuse_variants(config: dict[str, Any], family: str) -> None:
    """Refuse by name what a configuration can ask for beyond the family."""
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"activation {config['hidden_act']!r} is not supported")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UnsupportedModel(f"{key} is not supported for {family}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"quantised safetensors ({method}) are not supported")
    window, context = (
        config.get("sliding_window", _WINDOW_DEFAULT.get(family)),
        _need(config, "max_position_embeddings"),
    )
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    layers = config.get("layer_types")
    if layers is not None and set(layers) == {"full_attention"}:
        window = None
    if window and window < context:
        raise UnsupportedModel(f"sliding-window attention ({window} of {context} tokens) is not supported")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.parent.name} has no {path.name}") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path.name} is not a JSON object")
    return value


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """A file's header: 8 bytes of length, then JSON. Raises UnsupportedModel."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _HEADER_BYTES_MAX):
            raise UnsupportedModel(f"{path.name}: damaged safetensors header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            found = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"{path.name}: damaged safetensors header ({error})") from error
    for name, tensor in found.items():
        if tensor.type not in TYPES:
            raise UnsupportedModel(f"{path.name}: {name} has the unsupported type {tensor.type}")
        if tensor.offset + tensor.bytes > size:
            raise UnsupportedModel(f"{path.name} is cut short: {name} ends beyond the file")
    return found


def _stored(path: Path, name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(path, name, tuple(entry["shape"]), entry["dtype"], base + start, end - start)
