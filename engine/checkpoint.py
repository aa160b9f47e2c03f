"""Checkpoints: a model on disk, opened and checked but not loaded. No torch, so every process can afford it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from engine.architecture import Architecture, StoredTensor, UnsupportedModel
from engine.checkpoint_gguf import gguf_architecture, gguf_tensors
from engine.checkpoint_hf import hf_architecture, hf_tensors
from engine.gguf_file import read_gguf

__all__ = ["Architecture", "Checkpoint", "UnsupportedModel", "open_checkpoint"]

SAMPLE_BYTES = 1024
"""What the fingerprint reads at each of three places of each tensor: 0.8 MB for 272 tensors, milliseconds."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that this engine can run: all its tensors are there, in their shapes and in types we can read."""

    path: Path
    """A GGUF file or a Hugging Face folder."""
    format: str
    """`gguf` or `safetensors`."""
    architecture: Architecture
    tensors: dict[str, StoredTensor]
    """By Hugging Face's names, exactly those of `architecture.tensor_shapes()`."""

    def digest(self) -> str:
        """A fingerprint, 64 hexadecimal digits: equal for copies of one checkpoint, in every process.

        SHA-256 over the architecture and, for every tensor in the order of names, its name, shape, stored type
        and some KiB of its bytes from start, middle and end. It tells models apart that differ by training,
        conversion or quantisation, in milliseconds; it is no proof against someone who alters single weights.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self.architecture), sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(json.dumps([name, tensor.shape, tensor.type]).encode())
            with tensor.path.open("rb") as file:
                for start in (0, tensor.bytes // 2, max(0, tensor.bytes - SAMPLE_BYTES)):
                    file.seek(tensor.offset + start)
                    digest.update(file.read(min(SAMPLE_BYTES, tensor.bytes - start)))
        return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder. Raises UnsupportedModel, FileNotFoundError."""
    if path.is_dir():
        stored = hf_tensors(path)
        checkpoint = Checkpoint(path, "safetensors", hf_architecture(path, stored), stored)
    else:
        file = read_gguf(path)
        tensors = gguf_tensors(file)
        checkpoint = Checkpoint(path, "gguf", gguf_architecture(file, tensors), tensors)
    _require_tensors(checkpoint)
    return checkpoint


def _require_tensors(checkpoint: Checkpoint) -> None:
    """Refuse a missing tensor, one of another shape, and one that the model would ignore."""
    wanted = checkpoint.architecture.tensor_shapes()
    name = checkpoint.path.name
    for tensor, shape in wanted.items():
        stored = checkpoint.tensors.get(tensor)
        if stored is None:
            raise UnsupportedModel(f"{name}: the tensor {tensor} is missing")
        if stored.shape != shape:
            raise UnsupportedModel(f"{name}: {tensor} has shape {list(stored.shape)}, not {list(shape)}")
    for tensor in checkpoint.tensors:
        if tensor not in wanted:
            raise UnsupportedModel(f"{name}: the tensor {tensor} belongs to no supported architecture")
