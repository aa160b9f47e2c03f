"""The conductor section of the configuration."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ConductorConfig:
    """The Conductor: the HTTP edge, the registry, and the judgement."""

    host: str = "127.0.0.1"
    """Interface of the OpenAI-compatible endpoint."""

    port: int = 8000
    """Port of the OpenAI-compatible endpoint; 0 takes any free one."""

    listen: str = "tcp://127.0.0.1:8002"
    """Address of the control port, where instances register."""

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

    in_flight_max: int = 256
    """Most requests served at once; further ones are refused with 429."""

    request_s: float = 600.0
    """Deadline of a request from its arrival, in seconds."""

    drain_s: float = 5.0
    """How long running requests may go on after the Conductor was told to stop, in seconds."""

    keep_alive_s: float = 10.0
    """A silent stream gets a comment line this often, in seconds, so that nothing on the way cuts it."""

    balancing_threshold: float = 2.0
    """A prefix elsewhere is fetched when it is this many times longer than the instance's own."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log that is written."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "in_flight_max", "request_s", "keep_alive_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")
        for name in ("context_tokens", "drain_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
