"""The decode section of the configuration."""

from dataclasses import dataclass

from engine.config import ComputeSettings


@dataclass(frozen=True)
class DecodeConfig(ComputeSettings):
    """One decode instance."""

    instance: str = "decode-0"
    """Lasting name of this instance; must be unique in the cluster."""

    batch_max: int = 64
    """Most requests in one step."""

    chunk_tokens: int = 256
    """Most tokens that a step recomputes for one request (a failed load, a preemption) beside the batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("chunk_tokens", "batch_max")
