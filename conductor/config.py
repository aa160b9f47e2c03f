"""The conductor section of the configuration."""

from dataclasses import dataclass

from engine.config import ModelSettings


@dataclass(frozen=True)
class ConductorConfig(ModelSettings):
    """The Conductor: the HTTP edge, the registry, and the judgement."""

    host: str = "127.0.0.1"
    """Interface of the OpenAI-compatible endpoint."""

    port: int = 8000
    """Port of the OpenAI-compatible endpoint; 0 takes any free one."""

    listen: str = "tcp://127.0.0.1:8002"
    """Address of the control port, where instances register."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("in_flight_max", "request_s", "keep_alive_s")
        self._require_not_negative("drain_s")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
