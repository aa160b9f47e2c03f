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

    steps_max: int = 1
    """Most steps in one engine call while the batch stays the same; their tokens reach the client together."""

    stream_interval: int = 1
    """Tokens of an answer are sent when so many have been drawn, the first at once: fewer messages, and a less
    even stream."""

    write_back: bool = True
    """Whether blocks that answers fill go back to the pool, where the next turn of a chat finds them. Those of
    prompts that are computed here always do."""

    chunk_tokens: int = 256
    """Most tokens that a step computes for one request beside the batch: the rest of a prompt, or what a failed
    load or a preemption lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("chunk_tokens", "batch_max", "steps_max", "stream_interval")
