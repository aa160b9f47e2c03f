"""Settings that several services share: which model, and how an instance with an engine runs it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelSettings:
    """The model, as all members of a cluster must have it."""

    model: str = ""
    """A GGUF file, a Hugging Face folder, or a repository id; empty means the default model."""

    model_name: str = ""
    """Name that clients use for the model; empty derives it from the model."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Element type of weights, activations and KV."""

    block_tokens: int = 16
    """Tokens in one KV block; the same for the whole cluster."""

    kv_compression: Literal["none", "int8", "fp8"] = "none"
    """Form of KV in the pool: as it is, or one byte an element with scales; the same for the whole cluster."""

    context_tokens: int = 0
    """Longest prompt plus output; 0 takes what the model was made for."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log that is written."""

    def __post_init__(self) -> None:
        self._require_positive("block_tokens")
        self._require_not_negative("context_tokens")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")

    def _require_not_negative(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")


@dataclass(frozen=True)
class ComputeSettings(ModelSettings):
    """An instance that hosts an engine."""

    conductor: str = "tcp://127.0.0.1:8002"
    """Address of the Conductor's control port, where this instance registers; of several, with commas between."""

    listen: str = "tcp://127.0.0.1:0"
    """Address to listen at; port 0 takes any free one."""

    host: str = ""
    """Name of this machine: instances of equal host share memory. Empty means the machine's own name."""

    threads: int = 0
    """Threads of a forward pass; 0 takes every core of this machine."""

    pages: int = 0
    """KV pages of the engine's own memory; 0 makes room for two requests of the longest context."""

    queue_max: int = 256
    """Most requests that run, load or wait at once; further ones are refused."""

    kind: str = ""
    """Equal kinds take equal times for equal work; empty derives one from processor, threads and dtype."""

    calibrate_s: float = 1.0
    """Time for a few passes at the start, in seconds, from which the first requests are predicted; 0 is none."""

    transport: Literal["auto", "tcp", "mooncake"] = "auto"
    """How KV moves: auto takes shared memory on one host and TCP between hosts; mooncake takes Mooncake's Transfer
    Engine between hosts; tcp takes TCP always."""

    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """What Mooncake's Transfer Engine speaks, the same on all hosts."""

    mooncake_devices: str = ""
    """Network cards for it, as it names them, with commas between; empty takes all there are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("queue_max")
        self._require_not_negative("threads", "pages", "calibrate_s")
