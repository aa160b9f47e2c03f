"""The decode section of the configuration."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DecodeConfig:
    """One decode instance."""

    conductor: str = "tcp://127.0.0.1:8002"
    """Address of the Conductor's control port, where this instance registers."""

    listen: str = "tcp://127.0.0.1:0"
    """Address to listen at; port 0 takes any free one."""

    instance: str = "decode-0"
    """Lasting name of this instance; must be unique in the cluster."""

    host: str = ""
    """Name of this machine: instances of equal host share memory. Empty means the machine's own name."""

    model: str = ""
    """A GGUF file, a Hugging Face folder, or a repository id; empty means the default model."""

    model_name: str = ""
    """Name that clients use for the model; empty derives it from the model."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Element type of weights, activations and KV."""

    block_tokens: int = 16
    """Tokens in one KV block; the same for the whole cluster."""

    context_tokens: int = 0
    """Longest prompt plus output; 0 takes what the model was made for."""

    threads: int = 0
    """Threads of a forward pass; 0 takes every core of this machine."""

    pages: int = 0
    """KV pages of the engine's own memory; 0 makes room for two requests of the longest context."""

    batch_max: int = 64
    """Most requests in one step."""

    queue_max: int = 256
    """Most requests that run, load or wait at once; further ones are refused."""

    chunk_tokens: int = 256
    """Most tokens that a step recomputes for one request (a failed load, a preemption) beside the batch."""

    transport: Literal["auto", "tcp"] = "auto"
    """How KV moves: auto takes shared memory on one host and TCP between hosts; or tcp for TCP always."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log that is written."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "chunk_tokens", "queue_max", "batch_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")
        for name in ("context_tokens", "threads", "pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
