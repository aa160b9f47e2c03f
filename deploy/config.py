"""The settings of `dango serve`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ServeConfig:
    """How many instances to start on this machine, where to listen, and how patient to be."""

    model: str | None = None
    """What to serve, as MODEL; none is SmolLM2-135M-Instruct."""
    model_name: str | None = None
    """Name that clients use for the model; none derives it from the model."""
    host: str = "127.0.0.1"
    """Address that the HTTP service listens on; 0.0.0.0 opens it to the network."""
    port: int = 8000
    """Port of the HTTP service; 0 takes any free one."""
    prefill: int = 1
    """Number of prefill instances."""
    decode: int = 1
    """Number of decode instances."""
    kvcache: int = 1
    """Number of KVCache instances; the first also keeps the pool's directory."""
    threads: int | None = None
    """Threads of each prefill and decode instance; none shares this machine's cores out evenly."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Number type of the weights and of the KV cache; none leaves it to each instance's own default."""
    block_tokens: int | None = None
    """Tokens in one KV block; none leaves it to each instance's own default."""
    kv_compression: Literal["int8", "fp8"] | None = None
    """Form of KV in the pool, one byte an element with scales; none leaves it to each instance's own default."""
    log_dir: str | None = None
    """Folder that gets one log file an instance."""
    verbose: bool = False
    """Show every log line of every instance, not only warnings and errors."""
    ready_s: float = 300.0
    """Seconds that the instances may take until requests can be served (loading a large model is slow)."""
    drain_s: float = 10.0
    """Seconds that requests in flight get to end when the service is stopped."""
    stop_s: float = 5.0
    """Seconds that an instance gets to end after that, before it is killed."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "kvcache"):
            if not 1 <= getattr(self, name) <= INSTANCES_MAX:
                raise ValueError(f"{name} must be from 1 to {INSTANCES_MAX}, not {getattr(self, name)}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        for name in ("threads", "block_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("ready_s", "drain_s", "stop_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")


INSTANCES_MAX = 64
"""Of one pool on one machine: each is a process with its own copy of the weights."""
