"""The prefill section of the configuration."""

from dataclasses import dataclass

from engine.config import ComputeSettings


@dataclass(frozen=True)
class PrefillConfig(ComputeSettings):
    """One prefill instance."""

    instance: str = "prefill-0"
    """Lasting name of this instance; must be unique in the cluster."""

    chunk_tokens: int = 512
    """Most tokens computed in one forward pass; a multiple of block_tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("chunk_tokens")
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(f"chunk_tokens must be a multiple of block_tokens ({self.block_tokens})")
