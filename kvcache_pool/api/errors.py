"""What the KVCache pool refuses, and why."""

from protocol.errors import RemoteError


class PoolFull(RemoteError):
    """No room, even after evicting all that no lease names."""

    kind = "pool_full"


class QuotaExceeded(PoolFull):
    """The tenant may have no more of the pool, and too few of its own blocks can go: leases or hard pins hold the
    others. Room that other tenants give back does not help."""

    kind = "quota_exceeded"


class WrongTenant(RemoteError):
    """A block is another tenant's: it was neither read, named, pinned nor removed."""

    kind = "wrong_tenant"


class LeaseLost(RemoteError):
    """The lease ended (released, expired, or its owner was given up); its blocks may be somebody else's."""

    kind = "lease_lost"


class Unconfirmed(RemoteError):
    """Blocks are forgotten, and can be found no more; but a segment did not say that it has noted it down, so its
    next life may bring them back to the next life of the directory."""

    kind = "unconfirmed"


class Stale(RemoteError):
    """A slot has another generation than the grant says: it was reused. Nothing was read or written."""

    kind = "stale"


class NotFinite(RemoteError):
    """KV that is to be compressed holds NaN or infinity, or keys whose distance is none of float32. Its block was
    not stored."""

    kind = "not_finite"


class Corrupt(RemoteError):
    """A run's bytes do not have the checksum that was stored with them."""

    kind = "corrupt"


class CannotDrain(RemoteError):
    """There is no such segment, or no other memory that could take its blocks; nothing has changed."""

    kind = "cannot_drain"
