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

from kvcache_pool.api.client import (
    Directory,
    DirectoryLink,
)
from kvcache_pool.api.deadlines import (
    ANNOUNCE_EVERY_S,
    DIRECTORY_S,
    LEASE_S,
    NOTED_S,
    TRANSFER_S_MAX,
)
from kvcache_pool.api.directory import (
    NOTES_MAX,
    Acquire,
    Announce,
    Announced,
    Carried,
    Carry,
    Catalogue,
    Clear,
    Cleared,
    Commit,
    Copy,
    Counted,
    Discard,
    Done,
    Drain,
    Due,
    Existing,
    Exists,
    Found,
    GetCatalogue,
    GetDue,
    GetSegments,
    GetStats,
    Goodbye,
    Grant,
    Lease,
    Lookup,
    Note,
    Pin,
    PinKind,
    Place,
    Release,
    Remove,
    Renew,
    Segments,
    SegmentStats,
    Stats,
    Tier,
    Unpin,
    new_lease,
)
from kvcache_pool.api.errors import (
    CannotDrain,
    Corrupt,
    LeaseLost,
    NotFinite,
    PoolFull,
    QuotaExceeded,
    Stale,
    Unconfirmed,
    WrongTenant,
)
from kvcache_pool.api.mover import (
    Blocks,
    Mover,
    Priority,
)
from kvcache_pool.api.segment import (
    Checksums,
    GetChecksums,
    MooncakeAt,
    OpenMooncake,
    OpenStream,
    PullRuns,
    ReadLayer,
    Runs,
    StreamPort,
    WriteLayer,
)
from kvcache_pool.api.tenants import (
    GetTenant,
    TenantStats,
)

# fmt: off
__all__ = [
    "ANNOUNCE_EVERY_S", "DIRECTORY_S", "LEASE_S", "NOTED_S", "NOTES_MAX", "TRANSFER_S_MAX",
    "Acquire", "Announce", "Announced", "Blocks", "CannotDrain", "Carried", "Carry", "Catalogue",
    "Checksums", "Clear", "Cleared", "Commit", "Copy", "Corrupt", "Counted", "Directory",
    "DirectoryLink", "Discard", "Done", "Drain", "Due", "Existing", "Exists", "Found",
    "GetCatalogue", "GetChecksums", "GetDue", "GetSegments", "GetStats", "GetTenant", "Goodbye",
    "Grant", "Lease", "LeaseLost", "Lookup", "MooncakeAt", "Mover", "NotFinite", "Note",
    "OpenMooncake", "OpenStream", "Pin", "PinKind", "Place", "PoolFull", "Priority", "PullRuns",
    "QuotaExceeded", "ReadLayer", "Release", "Remove", "Renew", "Runs", "SegmentStats", "Segments",
    "Stale", "Stats", "StreamPort", "TenantStats", "Tier", "Unconfirmed", "Unpin", "WriteLayer",
    "WrongTenant", "new_lease",
]
# fmt: on
