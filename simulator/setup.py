"""All that a simulated run depends on, as one value: equal setups give equal runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from random import Random
from typing import Any, get_args, get_type_hints

from conductor.ask import Limits
from conductor.config import ConductorConfig
from conductor.place import PLACEMENTS
from simulator import workload
from simulator.cost import CostModel, cost_model
from simulator.synthetic import Phase, synthesize
from simulator.workload import BLOCK_TOKENS, Arrival

ADMISSIONS: tuple[str, ...] = get_args(get_type_hints(ConductorConfig)["admission"])
"""The Conductor's names for its rules of admission."""


class BadSetup(ValueError):
    """A setup that cannot be run; the text names the field."""


@dataclass(frozen=True)
class Setup:
    """A workload, a cluster and its settings. Frozen and picklable: it travels to a process of its own."""

    trace: str = "conversation"
    """A name in workload.TRACES or the path of a JSONL file. Not used when there are `phases`."""
    phases: tuple[Phase, ...] = ()
    """Made traffic instead of a trace."""
    speed: float = 1.0
    """How many times as fast the requests arrive."""
    skip: int = 0
    """Requests to leave out at the start."""
    limit: int | None = None
    """At most so many requests; None for all."""
    since_s: float = 0.0
    """Only requests from this moment of the trace, before it is sped up."""
    until_s: float = inf
    """Only requests before this moment of the trace, before it is sped up."""
    thinned: float = 1.0
    """Each request stays with this probability: less traffic without a change of its bursts."""
    spread: bool = False
    """Arrivals that tie are spread over the time to the next time stamp; else the stamps are taken as they are."""
    equal_prompts: int = 0
    """Every prompt has so many tokens; 0 leaves them as they are."""
    equal_share: bool = False
    """Equal prompts keep the prefixes that they share; else nothing can be reused."""
    outputs_times: float = 1.0
    """Answers are so many times as long."""
    output_limit: int | None = None
    """Answers are cut to so many tokens."""
    share_of_batch: float = 0.0
    """Share of requests of the class batch."""

    model: str = "llama3-70b-a800"
    """A name in cost.MODELS or the path of a JSON file."""
    prefill: int = 8
    """Prefill instances, each with a segment of its own beside it."""
    decode: int = 8
    """Decode instances."""
    segment_tokens: int = 3_000_000
    """KVCache of each prefill instance, in tokens, as in the FAST 2025 paper; 0: room for the whole workload."""

    placement: str = "global_cache_aware"
    """Which rule places requests, by its name in the Conductor."""
    balancing_threshold: float = 0.0
    """A prefix elsewhere is fetched when it is so many times as long as the own; 0: the Conductor derives it."""
    rests_on_decode: bool = True
    """Decode instances compute short rests of prompts themselves, where the Conductor predicts that it pays."""
    rest_steps_max: int = 4
    """In at most so many steps."""
    admission: str = "survival"
    """Which rule refuses requests, by its name in the Conductor."""
    reserve: bool = True
    """Count what is admitted but still in prefill."""
    hold: bool = True
    """Wait before the prefill instead of being refused, inside the TTFT limit."""
    size_blind: bool = False
    """Whether a request fits is judged as if it were of mean length: a control."""
    residence_s: float = 0.0
    """How long `predictive` takes every request to decode; 0: the running mean."""
    z: float = 1.75
    """Standard deviations that `reserve` adds."""
    margin: float = 0.0
    """Refuse only what passes a limit by this share of it."""
    hysteresis: float = 0.0
    """Once closed, a gate opens again when the prediction is below the limit by this share of it."""
    overtaken_max: int = 0
    """So many may pass a held request that does not fit yet."""
    rescue_share: float = 0.05
    """Of admitted tokens, for long prompts whose last moment to begin has come."""
    ttft_limit_s: float = 30.0
    """From arrival to the first token."""
    tbt_limit_s: float = 0.1
    """Between two tokens: mean of a request's longest tenth of gaps."""

    report_s: float = 1.0
    """Instances report to the Conductor this often."""
    chunk_tokens: int = 8192
    """Most tokens of one prefill pass."""
    stream_interval: int = 16
    """Tokens of an answer come to the Conductor so many at a time; when each was drawn is told beside it."""
    steps_max: int = 64
    """Most decode steps of one call of the engine, while nobody joins or leaves."""

    block_tokens: int = BLOCK_TOKENS
    """Tokens of a block, in the trace and in the cluster."""
    copies: bool = False
    """Sample on how many segments the most used blocks are."""
    seed: int = 0
    """Of all randomness: made traffic, spread, classes, tie-breaking, the network."""

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise BadSetup(f"no placement {self.placement!r}: there are {', '.join(PLACEMENTS)}")
        if self.admission not in ADMISSIONS:
            raise BadSetup(f"no admission {self.admission!r}: there are {', '.join(ADMISSIONS)}")
        above = (
            "speed",
            "outputs_times",
            "thinned",
            "prefill",
            "decode",
            "ttft_limit_s",
            "tbt_limit_s",
            "report_s",
        )
        self._require(0, False, *above)
        self._require(1, True, "rest_steps_max", "chunk_tokens", "steps_max", "stream_interval", "block_tokens")
        self._require(
            0,
            True,
            "skip",
            "equal_prompts",
            "segment_tokens",
            "z",
            "margin",
            "hysteresis",
            "residence_s",
            "share_of_batch",
            "overtaken_max",
            "rescue_share",
        )
        if self.chunk_tokens % self.block_tokens:
            raise BadSetup("chunk_tokens must be a multiple of block_tokens")
        if self.phases and self.block_tokens != BLOCK_TOKENS:
            raise BadSetup(f"made traffic has blocks of {BLOCK_TOKENS} tokens")
        if self.thinned > 1 or self.share_of_batch > 1:
            raise BadSetup("thinned and share_of_batch are at most 1")
        if max(self.hysteresis, self.rescue_share) >= 1:
            raise BadSetup("hysteresis and rescue_share are less than 1")
        if min(self.limit or 1, self.output_limit or 1) < 1 or 0 in (self.limit, self.output_limit):
            raise BadSetup("limit and output_limit are at least 1")

    def _require(self, floor: float, floor_included: bool, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not value >= floor or (value == floor and not floor_included):  # what is not a number is neither
                raise BadSetup(f"{name} must be {'at least' if floor_included else 'above'} {floor}, not {value}")

    def body(self) -> dict[str, Any]:
        """JSON-ready: what has no bound is None."""
        return {name: None if value == inf else value for name, value in asdict(self).items()}

    @property
    def limits(self) -> Limits:
        """Both limits, as each request asks for them."""
        return Limits(self.ttft_limit_s, self.tbt_limit_s)

    def cost(self) -> CostModel:
        """Raises cost.BadCostModel, or OSError."""
        return cost_model(self.model)

    def arrivals(self) -> list[Arrival]:
        """The workload, sorted by time, the first one at 0. Raises workload.BadTrace, or OSError.

        Each random transform draws from a generator of its own, so that switching one changes no other.
        """
        if self.phases:
            arrivals = synthesize(self.phases, self.random("phases"))
        else:
            arrivals = workload.load_trace(self.trace, self.block_tokens)
        return self._transformed(arrivals)

    def _transformed(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """First when, then how many, then what: a slice is the same one whatever the rest."""
        if self.spread:
            arrivals = workload.spread(arrivals, self.random("spread"))
        arrivals = workload.sliced(arrivals, self.skip, self.limit, self.since_s, self.until_s)
        if self.thinned < 1:
            arrivals = workload.thinned(arrivals, self.thinned, self.random("thinned"))
        arrivals = workload.sped(arrivals, self.speed)
        if self.equal_prompts:
            arrivals = workload.equal_prompts(arrivals, self.equal_prompts, self.equal_share, self.block_tokens)
        arrivals = workload.outputs_times(arrivals, self.outputs_times, self.output_limit)
        return workload.share_of_batch(arrivals, self.share_of_batch, self.random("batch"))

    def random(self, purpose: str) -> Random:
        """A generator for one purpose. Strings seed it by their SHA-512: the same in every process."""
        return Random(f"{self.seed} {purpose}")
