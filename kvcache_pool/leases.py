"""Leases: who holds which blocks, and until when. Pure.

    grant ──> current ──release──> gone
                 │ renew moves the end
                 └──end passed──> late ──release, or QUARANTINE_S later──> gone

A late lease can do nothing any more. It keeps what was reserved for it a while, because its writer may
still be writing there.
"""

import heapq
from dataclasses import dataclass

from kvcache_pool.api import TRANSFER_S_MAX
from kvcache_pool.slots import Block
from protocol.ids import LeaseId

QUARANTINE_S = TRANSFER_S_MAX + 10.0
"""How long slots reserved for a lease that ended unreleased are not given to others: a write that began just
before the end is over by then, with a margin for clocks that run at different speeds."""

LEASES_MAX = 1 << 16
"""Current leases. A request holds one or two, and a Conductor bounds its requests far below this."""

ENDS_SPARE = 1024
"""Heap entries of leases that are gone, beyond as many as are current, before they are swept out."""


@dataclass(eq=False)
class Claim:
    """One lease, as the directory sees it. Its end only ever moves forward."""

    lease: LeaseId
    owner: str
    end: float
    blocks: list[Block]
    """All that it names, in the order of the prompt."""
    targets: list[Block]
    """What can be committed: those of `blocks` that were reserved for it, as a commit counts them."""
    copies: list[tuple[Block, Block]]
    """Of `blocks`: each source that is to be copied, and the target that is for it."""
    moves: bool = False
    """Whether these copies take the place of their sources."""


class Leases:
    """All leases, by the names that their owners chose.

    Owns the claims. Always: one heap entry for each current lease (and for some that are gone, at most as many and
    ENDS_SPARE). Mutates: grant, renew, end, overdue, linger, lapsed.
    """

    def __init__(self) -> None:
        self._issued = 0
        self._current: dict[LeaseId, Claim] = {}
        self._ends: list[tuple[float, int, Claim]] = []
        self._late: dict[LeaseId, Claim] = {}  # in the order of their ends: the same time is added to each

    def __len__(self) -> int:
        return len(self._current)

    @property
    def full(self) -> bool:
        """Whether no more can be granted."""
        return len(self._current) >= LEASES_MAX

    def __contains__(self, lease: LeaseId) -> bool:
        """Whether the name is taken, by a current or a late lease."""
        return lease in self._current or lease in self._late

    def grant(self, claim: Claim) -> None:
        """A new lease, under a name that is free."""
        assert claim.lease not in self
        self._issued += 1
        self._current[claim.lease] = claim
        heapq.heappush(self._ends, (claim.end, self._issued, claim))

    def find(self, lease: LeaseId) -> Claim | None:
        """A current lease."""
        return self._current.get(lease)

    def renew(self, lease: LeaseId, end: float) -> bool:
        """Move a lease's end; never backwards. False if it is not current."""
        claim = self._current.get(lease)
        if claim is None:
            return False
        claim.end = max(claim.end, end)  # its heap entry moves when it comes up
        return True

    def end(self, lease: LeaseId) -> Claim | None:
        """Take a lease out, current or late: its owner is done with it. None if it is gone already."""
        claim = self._current.pop(lease, None)
        if len(self._ends) > 2 * len(self._current) + ENDS_SPARE:
            self._ends = [entry for entry in self._ends if self._is_current(entry[2])]
            heapq.heapify(self._ends)
        return claim or self._late.pop(lease, None)

    def _is_current(self, claim: Claim) -> bool:
        """Whether it was not ended since; another may have its name by now."""
        return self._current.get(claim.lease) is claim

    def overdue(self, now: float) -> list[Claim]:
        """Take out the current leases whose end has come, in the order of their ends."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            _, number, claim = heapq.heappop(self._ends)
            if not self._is_current(claim):
                continue  # released before its time
            if claim.end > now:
                heapq.heappush(self._ends, (claim.end, number, claim))
                continue
            ended.append(self._current.pop(claim.lease))
        return ended

    def linger(self, claim: Claim, until: float) -> None:
        """Keep what is left of an overdue lease."""
        claim.end = until
        self._late[claim.lease] = claim

    def lapsed(self, now: float) -> list[Claim]:
        """Take out the late leases whose quarantine is over."""
        over = []
        for lease, claim in self._late.items():
            if claim.end > now:
                break
            over.append(lease)
        return [self._late.pop(lease) for lease in over]

    def counts(self) -> dict[Block, int]:
        """How many leases, current or late, name each block. (For check.)"""
        counts: dict[Block, int] = {}
        for claim in [*self._current.values(), *self._late.values()]:
            for block in claim.blocks:
                counts[block] = counts.get(block, 0) + 1
        return counts

    def check(self) -> None:
        """Asserts that each current lease will be found overdue, once."""
        entries = [(end, claim) for end, _, claim in self._ends if self._is_current(claim)]
        assert sorted(claim.lease for _, claim in entries) == sorted(self._current)
        assert all(end <= claim.end for end, claim in entries)
        assert len(self._ends) <= 2 * len(self._current) + ENDS_SPARE + 1
        assert self._current.keys().isdisjoint(self._late)
