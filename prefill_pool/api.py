"""What the prefill pool promises. Read this first; nothing here does work."""

from dataclasses import field

from engine.api import Sampled, Sampling
from kvcache_pool.api import Copy, Grant, Place
from protocol.errors import RemoteError
from protocol.ids import BlockHash, Ids, LeaseId, RequestId
from protocol.message import Message


class PrefillBusy(RemoteError):
    """The instance's queue is full."""

    kind = "prefill_busy"


class PrefixLost(RemoteError):
    """A leased block could not be read as it was written; it has been discarded. Place the request again."""

    kind = "prefix_lost"


class StoreLost(RemoteError):
    """The computed KV could not be stored (lease or segment gone). Place the request again."""

    kind = "store_lost"


class Prefill(Message):
    """Compute the KV of `tokens` and draw the first token of each choice. Answered by Prefilled.

    `sources` cover the first `len(sources)` blocks: they are loaded, layer by layer, while computing. The
    rest is computed and stored in `targets`, which cover the remaining full blocks and the tail, in order;
    full blocks are committed under `blocks` as soon as all their layers are stored. What is loaded is written
    to `copies` besides: best effort, no request fails by it.
    """

    request: RequestId
    tokens: Ids
    prompt_tokens: int
    """How many of `tokens` are the client's prompt; the rest is output that an earlier attempt produced."""
    blocks: list[BlockHash]
    """The names of the full blocks of `tokens`."""
    directory: str
    """Where to commit: the directory that gave the lease."""
    lease: LeaseId
    sources: list[Grant]
    targets: list[Grant]
    places: list[Place]
    samplings: list[Sampling]
    """One for each choice; they differ by their seeds."""
    copies: list[Copy] = field(default_factory=list)
    """As the lease has them."""
    wants_tokens: bool = False
    """As the lease has it."""


class Prefilled(Message):
    """The KV is stored and committed, copies too where they could be; the first tokens, one for each choice."""

    first: list[Sampled]
    reused_tokens: int
    """Tokens whose KV was loaded and not computed."""
    queue_s: float
    compute_s: float
    """From the first pass to the last, loading included."""
    store_wait_s: float
    """How long storing went on after the last layer had been computed: what of it was visible."""
    load_s: float = 0.0
    """From the first read of the prefix to the arrival of its last layer; 0 when nothing was loaded."""
