"""Who is alive: what an instance tells the registry, and what it hears back.

The registry is embedded in the Conductor. An instance registers once a life, then reports every
REPORT_EVERY_S; a report that the registry does not recognise (it restarted, or has given the
instance up for dead) is answered by `known=False`, and the instance registers again.
"""

from dataclasses import field
from enum import Enum
from typing import NamedTuple

from protocol.cluster import Manifest
from protocol.errors import RemoteError
from protocol.ids import Incarnation, InstanceId
from protocol.message import Message

REPORT_EVERY_S = 0.5
"""Often enough that a queue seen by the Conductor is half a second old at worst. The Conductor may ask for another
pace (`Heard.report_s`): many instances report seldomer."""

DEAD_AFTER_REPORTS = 6
"""So many missed, and an instance is given up for dead: 3 s. A loop that is stuck this long would break any
latency limit anyway."""


class Pool(Enum):
    """Which pool an instance belongs to."""

    PREFILL = "prefill"
    KVCACHE = "kvcache"
    DECODE = "decode"


class Superseded(RemoteError):
    """A newer incarnation has registered under the same name; the older one must end."""

    kind = "superseded"


class Register(Message):
    """An instance that has passed its self-test joins. Answered by Welcome, or by Mismatch or Superseded."""

    instance: InstanceId
    incarnation: Incarnation
    pool: Pool
    address: str
    """Where its service listens."""
    host: str
    """Which machine it is on: shared memory reaches as far as equal hosts."""
    manifest: Manifest
    directory: bool = False
    """Whether this KVCache instance keeps the pool's directory."""
    kind: str = ""
    """What machine it is and how it computes: instances of one pool and kind take equal times for equal work."""


class GetManifest(Message):
    """Asked by a KVCache instance, which has no model of its own, before it can lay out its memory."""


class GetDirectory(Message):
    """Asked by a client of the KVCache pool, which is no member and hears of nothing. Answered by DirectoryAt."""


class DirectoryAt(Message):
    """Where the KVCache pool's directory listens."""

    address: str | None
    """None while there is none."""


TIMINGS_MAX = 64
"""Timings in one report: enough for a fit, and small. Of more passes, the latest are told."""


class Timing(NamedTuple):
    """A row. How long one forward pass took, for those who predict the next."""

    step: int
    """Which pass of this incarnation it was, counted from 1: a timing that comes twice is used once."""
    tokens: int
    """Of a prefill pass: tokens computed. Of a decode step: sequences in the batch."""
    context: int
    """Of a prefill pass: tokens of the same prompt whose KV was there before. Of a decode step: tokens whose KV it
    read, over all sequences."""
    seconds: float
    rest: int = 0
    """Of a decode step: tokens of one prompt that it computed beside the batch; 0 if there were none."""
    prefix: int = 0
    """Tokens of that prompt whose KV was there before."""


class Load(Message):
    """What an instance is doing at this moment. Fields that a pool does not have stay 0."""

    running: int = 0
    """Requests in the current step."""
    waiting: int = 0
    """Requests accepted and not yet running."""
    waiting_tokens: int = 0
    """Tokens that those requests (and the rest of the running prefills) still have to compute."""
    context_tokens: int = 0
    """Tokens whose KV the next decode step reads."""
    rows_max: int = 0
    """Most sequences of a decode step; who comes beyond waits for a place."""
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_leased: int = 0
    blocks_pending: int = 0
    """Reserved and not committed (a KVCache instance), or being loaded (a compute instance)."""
    steps: int = 0
    """Forward passes since the start."""
    step_age_s: float = 0.0
    """Since the last pass ended, while there is work; 0 when idle."""
    step_s: float = 0.0
    """Time of a step, a moving mean; 0 before the first."""
    tokens_s: float = 0.0
    """Tokens computed in a second of stepping, a moving mean; 0 before the first."""
    evicted: int = 0
    """Blocks evicted since the start."""
    tenants: int = 0
    """Tenants that have blocks in the pool's memory; of the instance with the directory, as are the next two."""
    largest_tenant: int = 0
    """Blocks of the one that has most."""
    over_quota: int = 0
    """Leases refused for their tenant's quota since the start."""
    preempted: int = 0
    """Requests preempted since the start."""
    draining: bool = False
    """Whether this KVCache instance's memory is drained: it is nobody's home then."""
    bad_frames: int = 0
    """Frames dropped because they were no message."""
    events: int = 0
    """Batches of KV events published since the start; this and what follows are of the directory's instance."""
    events_failed: int = 0
    """Batches of them that could be sent to nobody."""
    replays: int = 0
    """Replays of events begun since the start."""
    replays_abandoned: int = 0
    """Replays given up since their reader was gone or too slow."""
    listeners: int = 0
    """Connected to the events or their replay now."""
    listeners_refused: int = 0
    """Connections ended since the start because too many were open, or too many topics subscribed to."""
    timings: list[Timing] = field(default_factory=list)
    """Passes since the report before, at most TIMINGS_MAX."""


class Report(Message):
    """The heartbeat. Answered by Heard."""

    instance: InstanceId
    incarnation: Incarnation
    load: Load


class Leave(Message):
    """The instance ends in good order. Answered by Heard."""

    instance: InstanceId
    incarnation: Incarnation


class Heard(Message):
    """Answer to a report (and, as Welcome's part, to a registration)."""

    known: bool
    """False: register again."""
    directory: str | None
    """Where the KVCache pool's directory listens; None while there is none."""
    home: str | None = None
    """The segment nearest to this compute instance; None while there is none."""
    report_s: float = REPORT_EVERY_S
    """Report again after so long."""
    conductors: list[str] = field(default_factory=list)
    """Control ports of all Conductors that share this cluster, the answering one's included: report to each. Empty
    where there is one only."""


class Welcome(Message):
    """Answer to Register."""

    heard: Heard
