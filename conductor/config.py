"""The conductor section of the configuration."""

from dataclasses import dataclass
from typing import Literal

from engine.config import ModelSettings

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


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

    report_s: float = 0.5
    """How often instances report to the Conductor, in seconds; one that misses six reports is given up."""

    redis: str = ""
    """Redis through which several Conductors share one cluster, such as redis://10.0.0.1:6379/0; each cluster
    needs a database of its own. Empty means that this Conductor is alone."""

    drain_s: float = 5.0
    """How long running requests may go on after the Conductor was told to stop, in seconds."""

    keep_alive_s: float = 10.0
    """A silent stream gets a comment line this often, in seconds, so that nothing on the way cuts it."""

    placement: Literal["global_cache_aware", "local_cache_aware", "load_balance", "random"] = "global_cache_aware"
    """Which rule chooses the prefill instance: by predicted time to first token with a prefix from anywhere
    (global_cache_aware) or only from its own home (local_cache_aware), by its queue, or at random."""

    balancing_threshold: float = 0.0
    """A prefix elsewhere is fetched when it is this many times longer than the instance's own; 0 derives the ratio
    from measured times."""

    rests_on_decode: bool = True
    """Whether a decode instance computes what is not cached of a prompt itself, beside its batch, where that is
    predicted to be sooner than a trip through prefill and to break no limit of what runs there."""

    rest_steps_max: int = 4
    """Such a rest takes at most so many steps. More of them shorten the wait for the first token where prefill is
    busy, and lengthen the time between tokens within its limit."""

    ttft_limit_s: float = 30.0
    """Longest time to the first token of an interactive request that names none, in seconds; 0 is no limit."""

    tbt_limit_s: float = 0.5
    """Longest time between tokens of an interactive request that names none, in seconds; 0 is no limit."""

    batch_ttft_limit_s: float = 300.0
    """Longest time to the first token of a batch request that names none, in seconds; 0 is no limit."""

    batch_tbt_limit_s: float = 1.0
    """Longest time between tokens of a batch request that names none, in seconds; 0 is no limit."""

    refusal_status: int = 429
    """HTTP status of a refusal because of load, 429 or 503; where nobody can serve it is always 503."""

    admission: Literal["none", "at_decode", "early", "predictive", "survival"] = "survival"
    """Which rule refuses by prediction: none; at_decode, only after the prefill; or, before it, early (by decode's
    load now), predictive (all stay equally long) or survival (by the lengths of the answers so far)."""

    reserve: bool = True
    """Whether decode's room is also counted as taken by requests that are admitted and still in prefill."""

    hold: bool = True
    """Whether what does not fit waits before its prefill, within its TTFT limit, before it is refused."""

    reserve_z: float = 1.75
    """So many standard deviations are added to the load that is expected of decode."""

    margin: float = 0.0
    """A predicted time counts as too long when it is beyond its limit by more than this share of it."""

    hysteresis: float = 0.0
    """Once closed, a gate opens again when the prediction is below the limit by this share of it, less than 1."""

    samples_min: int = 8
    """With fewer fresh measurements of a kind of instance than this, nothing is refused by prediction."""

    residence_s: float = 0.0
    """How long predictive admission takes a request to stay in decode, in seconds; 0 takes the running mean."""

    batch_share: float = 0.8
    """Batch requests are admitted up to this share of the limits of a pool, which leaves the rest to interactive
    ones; those that count as interactive by now up to the whole."""

    held_max: int = 1024
    """Most requests held before their prefill; further ones are refused."""

    held_tokens_max: int = 16_000_000
    """Most prompt tokens of the requests held before their prefill; further ones are refused."""

    overtaken_max: int = 0
    """So many requests behind a held one may pass it while it does not fit; then all behind it wait. With more,
    long prompts are refused less often, and more are refused in all."""

    rescue_share: float = 0.05
    """Under overload long prompts, whose own prefill takes much of their limit, would hardly have their turn in
    time. At most so much of all admitted tokens goes to those of them whose last moment to begin has come."""

    batch_age_s: float = 60.0
    """A held batch request counts as interactive after so many seconds, so that it is served in the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("in_flight_max", "request_s", "keep_alive_s", "report_s")
        self._require_not_negative("drain_s", "balancing_threshold")
        self._require_not_negative("ttft_limit_s", "tbt_limit_s", "batch_ttft_limit_s", "batch_tbt_limit_s")
        self._require_not_negative("reserve_z", "margin", "samples_min", "residence_s", "overtaken_max")
        self._require_positive("held_max", "held_tokens_max", "batch_age_s", "rest_steps_max")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if self.redis and not self.redis.startswith(REDIS_SCHEMES):
            raise ValueError(f"redis must begin with one of {', '.join(REDIS_SCHEMES)}")  # it may hold a password
        if self.refusal_status not in (429, 503):
            raise ValueError(f"refusal_status must be 429 or 503, not {self.refusal_status}")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis must be 0 or more and less than 1, not {self.hysteresis}")
        if not 0 <= self.rescue_share < 1:
            raise ValueError(f"rescue_share must be 0 or more and less than 1, not {self.rescue_share}")
        if not 0 < self.batch_share <= 1:
            raise ValueError(f"batch_share must be more than 0 and at most 1, not {self.batch_share}")
