"""Messages of the directory about tenants."""

from protocol.ids import TenantId
from protocol.message import Message


class GetTenant(Message):
    """How much does this tenant have, and how much may it have? Answered by TenantStats."""

    tenant: TenantId


class TenantStats(Message):
    """Of one tenant."""

    blocks: int
    """In memory that is not drained, cached and reserved ones."""
    quota: int | None
    """At most so many; None: as many as there are."""
