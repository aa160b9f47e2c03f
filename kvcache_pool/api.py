"""What the KVCache pool promises. Read this first; nothing here does work.

Two services. The *directory* knows which block is where and who is using it. A *segment* is one
node's CPU memory, cut into slots of one block each.

The life of a block:

    Acquire ──> reserved ──Commit──> cached (named, found by Lookup) ──evicted──> free
                   │                    ^   while a lease names it, it is never evicted
                   └──Release/expiry──> free      (a reserved block that nobody committed)

A block is visible only once committed, so several writers may compute the same block at once: the
first commit gets the name, the others' copies stay private to their lease and go with it.
"""

from enum import Enum

from protocol.blocks import BlockLayout
from protocol.errors import RemoteError
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId
from protocol.message import Message

LEASE_S = 30.0
"""How long a lease lasts without renewal. Every transfer's deadline is shorter, so that a reader or
writer gives up before its blocks can go to somebody else."""

TRANSFER_S_MAX = 20.0
"""The deadline of one read or write of one layer."""


class PoolFull(RemoteError):
    """No room, even after evicting all that no lease names."""

    kind = "pool_full"


class LeaseLost(RemoteError):
    """The lease ended (released, expired, or its owner was given up); its blocks may be somebody else's."""

    kind = "lease_lost"


class Stale(RemoteError):
    """A slot has another generation than the grant says: it was reused. Nothing was read or written."""

    kind = "stale"


class Corrupt(RemoteError):
    """A run's bytes do not have the checksum that was stored with them."""

    kind = "corrupt"


# -- the directory ----------------------------------------------------------------------------------


class Place(Message):
    """Where a segment is and how to reach its bytes."""

    segment: SegmentId
    incarnation: Incarnation
    address: str
    """Its service, for readers and writers on other hosts."""
    host: str
    shm: str
    """Path of its shared memory file, for those on the same host."""
    slots: int
    layout: BlockLayout


class Announce(Message):
    """A segment tells the directory that it is there, every ANNOUNCE_EVERY_S. Answered by Done."""

    place: Place


class Goodbye(Message):
    """A segment ends in good order: its blocks leave the index. Answered by Done."""

    segment: SegmentId
    incarnation: Incarnation


class Lookup(Message):
    """How much of this chain of blocks is cached, and where? Changes nothing. Answered by Found."""

    blocks: list[BlockHash]


class Found(Message):
    """The longest unbroken prefix, in blocks."""

    reach: int
    """Over all segments together: what the pool can serve."""
    held: dict[str, int]
    """Of each segment that has the first block: how far the chain goes in that segment alone."""


class Grant(Message):
    """The right to read or write one slot, as long as the lease lasts."""

    segment: SegmentId
    slot: int
    generation: int


class Acquire(Message):
    """Lease the cached prefix of a prompt, and room for the rest. Answered by Lease; or PoolFull.

    All or nothing. `blocks` names the prompt's full blocks in order. At most the first `reuse` are taken
    from the cache (fewer if some went since the lookup); each of the others, and `unnamed` more
    (the tail), gets a free slot, in the segment `near` if that has room.
    """

    owner: str
    """The request, for the ledger."""
    blocks: list[BlockHash]
    reuse: int
    unnamed: int
    near: SegmentId | None
    lease_s: float = LEASE_S


class Lease(Message):
    """`sources` hold KV (the cached prefix), `targets` wait for it, in the order of the prompt."""

    lease: LeaseId
    sources: list[Grant]
    targets: list[Grant]
    places: list[Place]
    """Of every segment that a grant names."""


class Commit(Message):
    """Targets are written: publish them under their names. Answered by Done; or LeaseLost.

    `slots[i]` of `targets` (as an index into them) gets `blocks[i]`. Committing twice changes nothing.
    """

    lease: LeaseId
    slots: list[int]
    blocks: list[BlockHash]


class Renew(Message):
    """Extend a lease from now. Answered by Done; or LeaseLost."""

    lease: LeaseId
    lease_s: float = LEASE_S


class Release(Message):
    """End a lease: committed blocks stay cached, the others are freed. Answered by Done, also if it is gone."""

    lease: LeaseId


class Discard(Message):
    """A reader found these blocks bad (checksum, or not readable): forget them. Answered by Done."""

    grants: list[Grant]


class Clear(Message):
    """Forget every block that no lease names. Answered by Cleared."""


class Cleared(Message):
    blocks: int


class GetStats(Message):
    """Answered by Stats."""


class Stats(Message):
    """Counts of blocks over all segments. free + cached + reserved == total."""

    total: int
    free: int
    cached: int
    reserved: int
    """Given to a lease and not committed."""
    leased: int
    """Cached and named by a lease."""
    leases: int
    evicted: int
    """Since the start."""


class Done(Message):
    """It is done."""


# -- a segment --------------------------------------------------------------------------------------


class ReadLayer(Message):
    """One layer of these slots. Answered by Runs, one buffer a slot, checksums verified; or Stale, Corrupt."""

    layer: int
    slots: list[int]
    generations: list[int]


class Runs(Message):
    """The buffers beside this message hold one run each, in the order asked for."""

    valid: int
    """How many were good before the first bad one; only these are sent."""
    reason: str = ""
    """What was wrong with the first bad one."""


class WriteLayer(Message):
    """Write one layer of these slots from the buffers beside this message. Answered by Done; or Stale."""

    layer: int
    slots: list[int]
    generations: list[int]


class Priority(Enum):
    """Which transfer goes first when several wait: what a request waits for, before what only warms the cache."""

    LOAD = "load"
    STORE = "store"
    WRITE_BACK = "write_back"
