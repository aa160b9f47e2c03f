"""Messages of the directory: which block is where, and who may use it."""

import uuid
from dataclasses import field
from enum import Enum
from typing import NamedTuple

from kvcache_pool.api.deadlines import LEASE_S
from protocol.blocks import BlockLayout
from protocol.ids import NO_TENANT, BlockHash, Ids, Incarnation, LeaseId, SegmentId, TenantId, token_ids
from protocol.message import Message


class Tier(Enum):
    """What a segment's bytes lie on."""

    MEMORY = "memory"
    DISK = "disk"
    """Blocks get here only by being saved from memory, so it is nobody's home and takes no writes of requests."""


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
    tier: Tier = Tier.MEMORY


class Announce(Message):
    """A segment tells the directory that it is there, every ANNOUNCE_EVERY_S. Answered by Announced."""

    place: Place
    generation: int = 0
    """The highest that any slot has seen: a directory that is new to this segment begins far above it."""
    noted: int = 0
    """The number of the last news that the segment has noted down."""
    draining: bool = False
    """What it was told last: a directory that does not know the segment believes it."""


NOTES_MAX = 4096
"""Of one message: 200 KB, which costs either side a few milliseconds."""


class Note(NamedTuple):
    """A row. What a slot holds, as its segment notes it down for the next directory."""

    slot: int
    generation: int
    name: bytes
    """Of the block; empty when the slot holds none that should be found."""
    tenant: TenantId = NO_TENANT
    """Whose it is."""


class Announced(Message):
    """The directory knows the segment."""

    joined: bool
    """The directory does not know yet what it holds, and wants its Catalogue."""
    news: list[Note]
    """What has changed since the last that the segment noted, the oldest first, at most NOTES_MAX."""
    number: int
    """Of the last of `news`."""
    more: bool = False
    """Whether the segment should tell at once that it has noted this: there is more, or somebody waits for it."""
    draining: bool = False
    """Whether the segment is drained: its owner carries what it has to others (`Carry`)."""


class Catalogue(Message):
    """What a segment has noted down, some NOTES_MAX at a time. Answered by Counted: how many are cached by it now.

    A slot that is in use again keeps its new use. A note that is wrong does no harm: a reader finds another
    generation in the slot, or another checksum, and the block is forgotten.
    """

    segment: SegmentId
    incarnation: Incarnation
    notes: list[Note]
    last: bool = True
    """Whether this is the last part: until it has come, the directory asks again."""


class GetCatalogue(Message):
    """What does the directory believe that this segment holds, in the slots after this one? Answered by a
    Catalogue of at most NOTES_MAX notes, in the order of their slots; an empty one is the end."""

    segment: SegmentId
    after: int = -1


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


class Exists(Message):
    """Which of these blocks are cached, each for itself? Changes nothing. Answered by Existing."""

    blocks: list[BlockHash]


class Existing(Message):
    """In the order of the question."""

    cached: list[bool]


class Grant(NamedTuple):
    """A row. The right to read or write one slot, as long as the lease lasts."""

    segment: SegmentId
    slot: int
    generation: int


class Acquire(Message):
    """Lease the cached prefix of a prompt, and room for the rest. Answered by Lease; or PoolFull, QuotaExceeded.

    All or nothing; a second ask under the name of a living lease is refused. `blocks` names the prompt's
    full blocks in order. At most the first `reuse` are taken from the cache (fewer if some went since the
    lookup); each of the others, and `unnamed` more (the tail), gets a free slot, in the segment `near` if
    that has room.
    """

    lease: LeaseId
    """Chosen by the asker, unlike any other (`new_lease`): so it can release what it never heard it got."""
    owner: str
    """The request, for the ledger."""
    blocks: list[BlockHash]
    reuse: int
    unnamed: int
    near: SegmentId | None
    lease_s: float = LEASE_S
    copies: int = 0
    """At most so many blocks of the cached prefix that `near` lacks get a slot there too, the first of them, as
    room and budget allow. The asker, who loads them anyway, writes them there: so a hot prefix spreads."""
    moves: bool = False
    """Those copies take the place of what they are made of, with their pins: so they count against no budget, and
    what a disk has may be among them. The sources are forgotten when nobody reads them."""
    tenant: TenantId = NO_TENANT
    """Whose the blocks are: another's are WrongTenant, and what is stored counts against this one's quota."""


def new_lease() -> LeaseId:
    """A name for a lease that nobody has used."""
    return LeaseId(uuid.uuid4().hex)


class Copy(Message):
    """Room in the segment `near` for one more copy of `sources[source]` of the lease."""

    source: int
    target: Grant


class Lease(Message):
    """`sources` hold KV (the cached prefix), `targets` wait for it, in the order of the prompt."""

    lease: LeaseId
    sources: list[Grant]
    targets: list[Grant]
    places: list[Place]
    """Of every segment that a grant names."""
    copies: list[Copy] = field(default_factory=list)
    """What was granted of the copies that were asked for, in the order of the prompt."""
    wants_tokens: bool = False
    """Whoever commits should tell the tokens: somebody listens to the directory's events."""


class Commit(Message):
    """Targets are written: publish them under their names. Answered by Done; or LeaseLost, WrongTenant.

    `slots[i]` gets `blocks[i]`: an index into `targets`, and then `copies`. Committing twice changes nothing.
    """

    lease: LeaseId
    slots: list[int]
    blocks: list[BlockHash]
    tokens: Ids = field(default_factory=token_ids)
    """Of the blocks, which are then in a row, one after the other. Empty: the committer does not know, or was not
    asked (`Lease.wants_tokens`). They are for the directory's events only."""
    parent: BlockHash | None = None
    """The name before the first of the blocks; None where there is none, and where there are no tokens."""


class Renew(Message):
    """Extend a lease from now. Answered by Done; or LeaseLost."""

    lease: LeaseId
    lease_s: float = LEASE_S


class GetDue(Message):
    """Which blocks of this segment should be in the other tier too? In memory: those that no disk has. On a disk:
    those that were read twice and that no memory has. Answered by Due."""

    segment: SegmentId
    limit: int


class Due(Message):
    """Some of them, the first first, and where they lie. They are not leased: a reader finds out by generation and
    checksum if one is evicted meanwhile."""

    blocks: list[BlockHash]
    grants: list[Grant]
    tenants: list[TenantId]
    """Whose they are. Of a disk's, no more of one than its quota has room for in memory now."""


class Drain(Message):
    """Empty this segment: it gets no new blocks, and its owner carries those that it has to other memory. Or
    (`undo`) let it be like any other again. Answered by Counted: how many blocks it holds."""

    segment: SegmentId
    undo: bool = False


class Carry(Message):
    """The owner of a segment that is drained asks for work: lease some of its blocks, and room for them elsewhere.
    Answered by Carried; or PoolFull. What is committed then is forgotten in the drained segment by and by."""

    lease: LeaseId
    """Chosen as for Acquire. Not granted when nothing is to be carried."""
    segment: SegmentId
    limit: int
    avoid: list[SegmentId] = field(default_factory=list)
    """Segments that the asker could not reach lately."""


class Carried(Message):
    """Blocks to copy, what was used last first: `sources[i]` to `targets[i]`, to be committed as `blocks[i]`."""

    blocks: list[BlockHash]
    sources: list[Grant]
    targets: list[Grant]
    places: list[Place]
    """Of every segment that a grant names."""


class Release(Message):
    """End a lease: committed blocks stay cached, the others are freed. Answered by Done, also if it is gone."""

    lease: LeaseId
    prefix: list[BlockHash] = field(default_factory=list)
    """What comes before the lease's blocks, in order: it counts as used now too, and as used after them, so
    that the end of a chain is evicted before its beginning."""


class Discard(Message):
    """A reader found these blocks bad (checksum, or not readable): forget them. Answered by Done."""

    grants: list[Grant]


class Clear(Message):
    """Forget every block that no lease names; also those that a segment brings which is away now. Answered by
    Cleared when all segments have noted it, so that it holds for their next lives too; or Unconfirmed."""


class Cleared(Message):
    blocks: int


class PinKind(Enum):
    """How hard a pinned block is held."""

    SOFT = "soft"
    """Evicted only when nothing else is left to evict."""
    HARD = "hard"
    """Never evicted. It counts as taken: a pool full of hard pins has no room."""


class Pin(Message):
    """Keep these cached blocks, until `for_s` is over or an Unpin. Answered by Counted: how many blocks of the
    unbroken prefix are pinned now; the others are not cached, or (hard pins) would exceed what may be pinned."""

    blocks: list[BlockHash]
    kind: PinKind
    for_s: float
    tenant: TenantId | None = None
    """Whose they must be, or nothing is done (WrongTenant); None, of operators: whoever's they are. So below."""


class Unpin(Message):
    """These blocks are evicted as all others again. Answered by Counted: how many had been pinned."""

    blocks: list[BlockHash]
    tenant: TenantId | None = None


class Remove(Message):
    """Forget these blocks, wherever they are, pinned or not; not those that a lease names. Answered by Counted
    when the segments have noted it; or Unconfirmed."""

    blocks: list[BlockHash]
    tenant: TenantId | None = None


class Counted(Message):
    """Of how many blocks it was true."""

    blocks: int


class GetSegments(Message):
    """Answered by Segments."""


class SegmentStats(NamedTuple):
    """A row. One segment's blocks: free + cached + reserved == total, with `total` among its place's facts."""

    segment: SegmentId
    incarnation: Incarnation
    host: str
    total: int
    free: int
    cached: int
    leased: int
    pinned: int
    copies: int
    on_disk: bool
    draining: bool = False


class Segments(Message):
    """Every segment that is there, in the order of joining."""

    segments: list[SegmentStats]


class GetStats(Message):
    """Answered by Stats."""


class Stats(Message):
    """Counts of blocks over all memory. free + cached + reserved == total."""

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
    copies: int
    """Cached or reserved in one segment as copies of what another has; in `cached` and `reserved` too."""
    pinned: int = 0
    """Cached and pinned, soft or hard; on disks too."""
    disk_total: int = 0
    """Of the disk tiers, which the counts above leave out."""
    disk_cached: int = 0
    tenants: int = 0
    """That have blocks in memory; those that name no tenant are none."""
    largest_tenant: int = 0
    """Blocks in memory of the tenant that has most."""
    over_quota: int = 0
    """Times that a lease was refused for its tenant's quota, since the start."""


class Done(Message):
    """It is done."""
