"""A tiny Hugging Face folder written again as a GGUF file, the way that converters lay it out."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[Any]


def gguf_copy(
    folder: Path,
    path: Path,
    *,
    type_: str = "F32",
    fields: Mapping[str, int | float | str | None] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
) -> Path:
    """Write `folder`'s model to `path`, matrices as `type_`; returns `path`.

    `fields` and `tensors` replace or add what is named in them, and leave it out where the value is None.
    Fields are named without the architecture's prefix, unless they start with `general.` or `split.`.
    """
    config = json.loads((folder / "config.json").read_text())
    family = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, family)
    for key, value in (_fields(config) | dict(fields or {})).items():
        if value is not None:
            _add(writer, key if key.startswith(("general.", "split.")) else f"{family}.{key}", value)
    for name, array in (_tensors(folder, config) | dict(tensors or {})).items():
        if array is not None:
            kind = gguf.GGMLQuantizationType[type_ if array.ndim == 2 else "F32"]
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _fields(config: dict[str, Any]) -> dict[str, int | float | str | None]:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: int | float | str) -> None:
    {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)


def _tensors(folder: Path, config: dict[str, Any]) -> dict[str, Array | None]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config["model_type"].replace("mistral", "llama").upper()], 99)
    found: dict[str, Array | None] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        heads = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
        kind = ".".join(name.split(".")[-2:])
        if config["model_type"] in ("llama", "mistral") and kind in heads:
            array = _interleaved(array, config[heads[kind]])
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(rope, config["head_dim"])
    return found


def _interleaved(matrix: Array, heads: int) -> Array:
    """Rotary pairs side by side, as llama.cpp turns them, instead of in two halves of a head."""
    rows, columns = matrix.shape
    pair = rows // heads // 2
    order = [head * 2 * pair + half * pair + at for head in range(heads) for at in range(pair) for half in (0, 1)]
    assert sorted(order) == list(range(rows))
    assert matrix[order].shape == (rows, columns)
    return matrix[order]


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Array:
    """What converters store for Llama 3.1: by how much each frequency is divided."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns < low:
            factors.append(rope["factor"])
        elif turns > high:
            factors.append(1.0)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
