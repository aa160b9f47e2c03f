"""What the decode pool promises. Read this first; nothing here does work."""

from engine.api import EndReason, Sampled, Sampling
from kvcache_pool.api import Grant, Place
from protocol.errors import RemoteError
from protocol.ids import BlockHash, Ids, RequestId, SegmentId
from protocol.message import Message


class DecodeBusy(RemoteError):
    """The instance's queue is full."""

    kind = "decode_busy"


class TooLong(RemoteError):
    """The request could never fit in the instance's memory, even alone."""

    kind = "too_long"


class Decode(Message):
    """Continue a request whose KV is in the pool, or begin one. Answered by a stream: Joined, Tokens..., Ended.

    `sources` cover tokens from the first on: all but the last, whose KV the first step computes; or fewer, in
    whole blocks. The rest is computed here, in chunks beside the batch, as is a block that cannot be loaded. Full
    blocks of the prompt that are computed so go to the pool.
    """

    request: RequestId
    choice: int
    prompt: Ids
    output: Ids
    """Tokens of the answer so far; none if the first is drawn here."""
    blocks: list[BlockHash]
    """The names of the full blocks of the tokens that `sources` cover."""
    tenant: str
    salt: str
    """With the manifest, what block names start from: full blocks made by decoding are written back, as the
    tenant's."""
    sources: list[Grant]
    places: list[Place]
    sampling: Sampling
    chunk_tokens: int = 0
    """Of its tokens a step computes at most so many, and no more than the instance is set to; 0: as it is set."""
    near: SegmentId | None = None
    """Where full blocks that are filled here are stored; None: at the instance's home."""


class Joined(Message):
    """The KV has been loaded: the pool's lease on it is no longer needed."""

    queue_s: float
    load_s: float
    loaded_tokens: int = 0
    """So many of the tokens' KV came from the pool; the others are computed."""


class Tokens(Message):
    """The next tokens of the answer, one at least."""

    tokens: list[int]
    details: list[Sampled]
    """One for each token if logprobs were asked for, else none."""
    took_s: list[float]
    """How long the step that drew each of them took."""


class Ended(Message):
    """The last item of the stream."""

    reason: EndReason
