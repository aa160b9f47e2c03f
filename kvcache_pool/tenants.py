"""How much of the pool's memory each tenant has, and how much of it one may have. Pure.

Who names no tenant is none: nobody is kept within bounds so, and a pool of one owner has no use for a quota.
"""

from collections import Counter
from collections.abc import Mapping

from protocol.ids import NO_TENANT, TenantId

UNBOUNDED = 1 << 62
"""More blocks than there are."""


class Tenants:
    """Counts of blocks in memory, reserved ones as cached ones. A disk's do not count.

    Owns the counts; the slots are others'. Always: who is counted has blocks. Mutates: resize, add, drop, refuse.
    """

    def __init__(self, share: float) -> None:
        """`share` is the most that one may have of all slots, above 0; 1 sets no bound."""
        self.bounded = share < 1.0
        """Whether there are quotas at all."""
        self.refused = 0
        """Leases that were refused for a quota."""
        self._share = share
        self._slots = 0
        self._held: dict[TenantId, int] = {}

    def __len__(self) -> int:
        """How many have blocks."""
        return len(self._held) - (NO_TENANT in self._held)

    @property
    def largest(self) -> int:
        """The blocks of the one that has most. O(tenants)."""
        return max((held for tenant, held in self._held.items() if tenant != NO_TENANT), default=0)

    def resize(self, slots: int) -> None:
        """The pool has so many slots of memory more, or (below 0) less."""
        self._slots += slots

    def held(self, tenant: TenantId) -> int:
        """Its blocks in memory."""
        return self._held.get(tenant, 0)

    def quota(self, tenant: TenantId) -> int | None:
        """The most that it may have: one block at least, so that a small pool is of use. None is no bound."""
        return max(1, int(self._share * self._slots)) if self.bounded and tenant != NO_TENANT else None

    def left(self, tenant: TenantId) -> int:
        """How many more it may have while none of its own goes. Below 0 if it has too many: when it got them, the
        pool or the share was larger."""
        quota = self.quota(tenant)
        return UNBOUNDED if quota is None else quota - self.held(tenant)

    def over(self, tenant: TenantId, count: int) -> int:
        """How many of its own must go for so many new ones. None for none: who only reads is not bounded."""
        return max(0, count - self.left(tenant)) if count else 0

    def add(self, tenant: TenantId) -> None:
        """It has one block more."""
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def drop(self, tenant: TenantId) -> None:
        """It has one block less."""
        held = self._held[tenant] - 1
        if held:
            self._held[tenant] = held
        else:
            del self._held[tenant]

    def check(self, slots: int, held: Mapping[TenantId, int]) -> None:
        """Asserts that these are the counts."""
        assert self._slots == slots
        assert Counter(self._held) == Counter(held)
        assert all(self._held.values())
