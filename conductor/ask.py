"""What the gateway asks of the dispatcher, and what it hears back. No HTTP object goes past this file."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from decode_pool.api import Tokens
from engine.api import EndReason, Sampling
from protocol.ids import Ids, RequestId


class Priority(Enum):
    """A request's class. Batch is what waits, or is refused, first."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True)
class Limits:
    """What a request wants of its latency; admission judges by it."""

    ttft_s: float
    """From arrival to the first token."""
    tbt_s: float
    """Between two tokens."""


NO_LIMITS = Limits(float("inf"), float("inf"))
"""Whatever it takes."""


@dataclass(frozen=True)
class Ask:
    """One prompt to answer, in one or more choices."""

    request: RequestId
    prompt: Ids
    samplings: list[Sampling]
    """One for each choice: they differ by their seeds."""
    tenant: str = ""
    salt: str = ""
    within_s: float = 600.0
    """What is left of the whole request's deadline."""
    waited_s: float = 0.0
    """How long ago its client asked: reading the body and tokenising take time too."""
    priority: Priority = Priority.INTERACTIVE
    limits: Limits = NO_LIMITS


class Reply(Protocol):
    """Where the answer goes. Called from one coroutine for each choice."""

    def admitted(self) -> None:
        """The request is let in: its prefill begins, or stands in an instance's queue. Called once."""
        ...

    def prefilled(self, reused_tokens: int) -> None:
        """The prompt's KV is there; so many of its tokens were not computed anew. Called once."""
        ...

    async def tokens(self, choice: int, said: Tokens) -> bool:
        """The next tokens. False: this choice needs no more (a stop string); it then ends without `end`."""
        ...

    async def end(self, choice: int, reason: EndReason) -> None:
        """A choice's last token has been sent."""
        ...


@dataclass(frozen=True)
class Refusal:
    """The Conductor decided not to serve this now. A value, not a fault."""

    reason: str
    """One of a fixed list: `no_prefill`, `no_decode`, `no_kvcache`, `pool_full`, `quota`, `queue_full`,
    `draining`; and, by prediction, `ttft` and `tbt`: the limit that would not hold."""
    text: str
    """A sentence for the client."""
    retry_after_s: float
    """When it is worth asking again."""
    status: int = 503
    """503: nobody can serve; 429: there is capacity, and it is taken."""
    ttft_s: float | None = None
    """The predicted time to first token, if that was looked at."""
    tbt_s: float | None = None
    """The predicted time between tokens, if that was looked at."""
    limits: Limits | None = None
    """What they were held against."""


class Refused(Exception):
    """Carries a Refusal to the gateway."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


class Failed(Exception):
    """An accepted request that could not be finished: instances died, or its deadline passed."""


@dataclass(frozen=True)
class Readiness:
    """Whether requests can be served, and why not."""

    ready: bool
    missing: list[str] = field(default_factory=list)
    """Sentences, one for each pool that has no instance."""
    degraded: list[str] = field(default_factory=list)
    """Sentences about what is not as it should be while requests are served all the same."""


class Serve(Protocol):
    """What the gateway needs of the dispatcher."""

    async def serve(self, ask: Ask, reply: Reply) -> None:
        """Answer; returns when every choice has ended. Raises Refused before the first token, or Failed.

        Cancelling this coroutine stops all work for the request and returns its blocks.
        """
        ...

    def readiness(self) -> Readiness:
        """Whether every pool has an instance that passed its self-test."""
        ...
