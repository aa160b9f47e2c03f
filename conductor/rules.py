"""By which rules admission judges. Pure."""

from dataclasses import dataclass

from conductor.forecast import PRESENCES

NONE, AT_DECODE = "none", "at_decode"
POLICIES = (NONE, *PRESENCES)
"""Names of the admission policies."""


@dataclass(frozen=True)
class Rules:
    """How to judge. The Conductor's configuration has the same fields, with their sentences."""

    policy: str = "survival"
    """One of POLICIES."""
    reserve: bool = True
    """Whether what is admitted and still in prefill counts as there, and what is doubtful by `z`."""
    hold: bool = True
    """Whether what does not fit waits, while its TTFT limit is within reach."""
    z: float = 1.75
    """Standard deviations added to what is expected of decode, with `reserve`."""
    margin: float = 0.0
    """A prediction is too long beyond its limit and this share of it."""
    hysteresis: float = 0.0
    """After one was held or refused, the next needs a prediction below the limit by this share of it."""
    samples_min: int = 8
    """Fresh samples of a kind of instance, with fewer of which nothing is refused by its predictions."""
    residence_s: float = 0.0
    """The report's t_d for `predictive`; 0 takes the running mean."""
    batch_share: float = 0.8
    """Batch requests that have not aged may fill this share of decode's limits; the rest is kept for interactive
    ones."""
    size_blind: bool = False
    """Whether each prompt is judged as if it were of mean size: a control, since a test of what fits refuses
    the long ones first."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"admission must be one of {', '.join(POLICIES)}, not {self.policy!r}")
