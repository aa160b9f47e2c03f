"""Opening models: what is read from either format, and that everything else is refused by name (B17)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.checkpoint import Architecture, UnsupportedModel, open_checkpoint
from tests.gguf_copy import gguf_copy
from tests.tiny import LLAMA3_ROPE, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


def changed(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of `folder` with other values in config.json; `...` removes a key."""
    shutil.copytree(folder, to)
    fields = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))
    return to


def with_tensors(folder: Path, to: Path, **tensors: Any) -> Path:
    """A copy of `folder` with other tensors (dots written as __); None removes one."""
    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    found = load_file(file) | {name.replace("__", "."): array for name, array in tensors.items()}
    save_file({name: array for name, array in found.items() if array is not None}, file)
    return to


# --- what is read ---


def test_the_architecture_of_a_folder(folder: Path):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "safetensors"
    assert checkpoint.architecture == Architecture(
        family="llama",
        layers=3,
        hidden=96,
        heads=6,
        kv_heads=2,
        head_dim=16,
        intermediate=160,
        vocab=512,
        context_tokens=2048,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        rope_factors=False,
        tied=False,
        qkv_bias=False,
        qk_norm=False,
    )


def test_older_configurations_name_the_rope_otherwise(folder: Path, tmp_path: Path):
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    new = open_checkpoint(changed(folder, tmp_path / "new", rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5}))
    for name, kind in (("old", "rope_type"), ("older", "type")):
        spelt = {**{k: v for k, v in scaling.items() if k != "rope_type"}, kind: "llama3"}
        old = changed(folder, tmp_path / name, rope_parameters=..., rope_scaling=spelt, rope_theta=500000)
        assert open_checkpoint(old).architecture == new.architecture
    plain = changed(folder, tmp_path / "plain", rope_parameters=..., rope_scaling=None, rope_theta=500000)
    assert open_checkpoint(plain).architecture.rope_theta == 5e5


def test_the_architecture_of_a_gguf_copy_is_the_folders(tmp_path: Path):
    for family in ("llama", "qwen2", "qwen3"):
        hf = tiny_model(tmp_path / family, family)
        copy = open_checkpoint(gguf_copy(hf, tmp_path / f"{family}.gguf"))
        assert copy.format == "gguf"
        original = open_checkpoint(hf).architecture
        assert copy.architecture.norm_eps == pytest.approx(original.norm_eps)
        assert {**vars(copy.architecture), "norm_eps": 0} == {**vars(original), "norm_eps": 0}


def test_a_tied_model_may_store_the_shared_matrix_twice(tmp_path: Path):
    tied = tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    embed = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    twice = with_tensors(tied, tmp_path / "twice", lm_head__weight=embed)
    assert open_checkpoint(twice).architecture == open_checkpoint(tied).architecture


def test_a_window_that_is_never_reached_is_no_window(tmp_path: Path):
    mistral = tiny_model(tmp_path / "m", "mistral", sliding_window=2048)
    assert open_checkpoint(mistral).architecture.family == "mistral"
    qwen = changed(
        tiny_model(tmp_path / "q", "qwen2"), tmp_path / "off", sliding_window=64, use_sliding_window=False
    )
    assert open_checkpoint(qwen).architecture.family == "qwen2"


# --- fingerprints (B26) ---


def test_copies_have_one_digest_in_every_process(folder: Path, tmp_path: Path):
    here = open_checkpoint(folder).digest()
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    code = "import sys; from pathlib import Path; from engine.checkpoint import open_checkpoint as o;"
    code += "sys.stdout.write(o(Path(sys.argv[1])).digest()); assert 'torch' not in sys.modules"
    there = subprocess.run(
        [sys.executable, "-c", code, moved], capture_output=True, text=True, timeout=60, check=True
    )
    assert there.stdout == here
    assert len(here) == 64


def test_other_weights_or_architecture_make_another_digest(folder: Path, tmp_path: Path):
    retrained = tiny_model(tmp_path / "retrained", seed=1)
    norm = np.ones(96, dtype=np.float32)
    paths = [
        folder,
        retrained,
        changed(folder, tmp_path / "theta", rope_parameters={"rope_type": "default", "rope_theta": 9.0}),
        changed(folder, tmp_path / "context", max_position_embeddings=1024),
        with_tensors(folder, tmp_path / "norm", model__norm__weight=norm),
        gguf_copy(folder, tmp_path / "a.gguf"),
        gguf_copy(folder, tmp_path / "b.gguf", type_="Q8_0"),
    ]
    assert len({open_checkpoint(path).digest() for path in paths}) == len(paths)


# --- what is refused ---

REFUSED_CONFIGS = {
    "gemma2": {"model_type": "gemma2"},
    "rope scaling 'yarn'": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    "rope scaling 'linear'": {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "low_freq_factor": {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
    "partial rotary": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "activation 'gelu'": {"hidden_act": "gelu"},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "quantised safetensors (gptq)": {"quantization_config": {"quant_method": "gptq"}},
    "num_hidden_layers is missing": {"num_hidden_layers": ...},
    "config.json: num_hidden_layers must be a whole number, not '3'": {"num_hidden_layers": "3"},
    "config.json: num_key_value_heads must be a whole number": {"num_key_value_heads": 2.5},
    "config.json: head_dim must be a whole number": {"head_dim": True},
    "config.json: rms_norm_eps must be a number, not 'a'": {"rms_norm_eps": "a"},
    "config.json: rope_theta must be a number, not [1]": {"rope_parameters": ..., "rope_theta": [1]},
    "every extent": {"num_attention_heads": 0, "head_dim": ...},
    "context (max_position_embeddings; context_length in GGUF) is 1 token": {"max_position_embeddings": 1},
    "context (max_position_embeddings; context_length in GGUF) is -5 token": {"max_position_embeddings": -5},
    "model.layers.3.input_layernorm.weight is missing": {"num_hidden_layers": 4},
    "model.layers.2.input_layernorm.weight belongs to no": {"num_hidden_layers": 2},
    "has shape [512, 96], not [511, 96]": {"vocab_size": 511},
    "has shape [32, 96], not [48, 96]": {"num_key_value_heads": 3},
    "do not divide": {"num_key_value_heads": 4},
    "q_proj.bias is missing": {"model_type": "qwen2"},
    "q_norm.weight is missing": {"model_type": "qwen3", "head_dim": 16},
    "sliding-window attention (4096 of 8192": {
        "model_type": "mistral",
        "max_position_embeddings": 8192,
        "sliding_window": ...,
    },
    "sliding-window attention (64 of 2048": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 64,
    },
}


@pytest.mark.parametrize("reason", REFUSED_CONFIGS)
def test_a_folder_beyond_the_family_is_refused_by_name(folder: Path, tmp_path: Path, reason: str):
    with pytest.raises(UnsupportedModel) as refusal:
        open_checkpoint(changed(folder, tmp_path / "changed", **REFUSED_CONFIGS[reason]))
    assert reason in str(refusal.value)


REFUSED_FIELDS: dict[str, dict[str, Any]] = {
    "architecture 'gemma2'": {"general.architecture": "gemma2"},
    "a.gguf is a damaged or cut GGUF file: alignment 0": {"general.alignment": 0},
    "is one of 3 parts": {"split.count": 3},
    "rope scaling 'yarn'": {"rope.scaling.type": "yarn"},
    "partial rotary": {"rope.dimension_count": 8},
    "values of another head size": {"attention.value_length": 8},
    "mixture-of-experts": {"expert_count": 8},
    "sliding-window attention (64 of 2048": {"attention.sliding_window": 64},
    "llama.block_count is missing": {"block_count": None},
    "context_length in GGUF) is 1 token": {"context_length": 1},
}


@pytest.mark.parametrize("reason", REFUSED_FIELDS)
def test_a_gguf_file_beyond_the_family_is_refused_by_name(folder: Path, tmp_path: Path, reason: str):
    path = gguf_copy(folder, tmp_path / "a.gguf", fields=REFUSED_FIELDS[reason])
    with pytest.raises(UnsupportedModel) as refusal:
        open_checkpoint(path)
    assert reason in str(refusal.value)


def test_tensors_of_a_gguf_file_that_are_missing_or_too_many(folder: Path, tmp_path: Path):
    for name, array in (("blk.1.ffn_up.weight", None), ("blk.1.attn_q.bias", np.zeros(96, dtype=np.float32))):
        path = gguf_copy(folder, tmp_path / "a.gguf", tensors={name: array})
        with pytest.raises(
            UnsupportedModel, match=r"layers\.1\.(mlp\.up_proj\.weight is|self_attn\.q_proj\.bias bel)"
        ):
            open_checkpoint(path)


def test_a_quantisation_that_nobody_reads(tmp_path: Path):
    blocks_of_256 = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 256}
    path = gguf_copy(tiny_model(tmp_path / "wide", **blocks_of_256), tmp_path / "a.gguf", type_="TQ1_0")
    with pytest.raises(UnsupportedModel, match=r"unsupported quantisation TQ1_0"):
        open_checkpoint(path)


def test_damaged_files(folder: Path, tmp_path: Path):
    whole = gguf_copy(folder, tmp_path / "a.gguf").read_bytes()
    for length in (0, 4, 23, 100, 400, 3000, len(whole) - 2000):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(
            UnsupportedModel, match=r"^cut\.gguf is (a damaged or cut GGUF file|cut short)"
        ) as refusal:
            open_checkpoint(tmp_path / "cut.gguf")
        assert "unpack" not in str(refusal.value)
    (tmp_path / "text.gguf").write_text("no model at all, but long enough for a header")
    with pytest.raises(UnsupportedModel, match="not a GGUF"):
        open_checkpoint(tmp_path / "text.gguf")
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 50, len(weights) - 1):
        (broken / "model.safetensors").write_bytes(weights[:length])
        with pytest.raises(UnsupportedModel):
            open_checkpoint(broken)
    for header in (b"[]", b'{"x": 5}', b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": "ab"}}'):
        (broken / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(UnsupportedModel, match="damaged"):
            open_checkpoint(broken)


def test_folders_that_lack_a_part(folder: Path, tmp_path: Path):
    for missing in ("config.json", "model.safetensors"):
        copy = shutil.copytree(folder, tmp_path / missing)
        (copy / missing).unlink()
        with pytest.raises(UnsupportedModel, match="no " if missing == "config.json" else "no .safetensors"):
            open_checkpoint(copy)
    part = shutil.copytree(folder, tmp_path / "part")
    for escape in ("part-2.safetensors", "../llama/model.safetensors"):
        (part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": escape}}))
        with pytest.raises(UnsupportedModel, match="is missing"):
            open_checkpoint(part)
