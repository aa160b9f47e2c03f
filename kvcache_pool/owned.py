"""The idle blocks of one segment, each tenant's by themselves: which of its own it gives up at its quota. Pure."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol.ids import NO_TENANT, TenantId


@dataclass(slots=True)
class Ring:
    """One tenant's blocks."""

    end: int
    """Stands between the last to go and the first; the number after it does so for those that are pinned."""
    count: int = 0


class Owned:
    """Rings of slots, two for each tenant: the least recently used goes first, and what is pinned softly after all
    others. That is the order of `LeastRecent`; its rivals rank a block by the use of the whole segment.

    8 bytes a slot, and a little for each tenant that has an idle block; every operation is O(1). Always: has just
    those that were put and not dropped since. Mutates: put, demote, tuck, drop.
    """

    def __init__(self, tenants: "array[int]") -> None:
        """`tenants` has that of each slot; a slot keeps its tenant as long as it is here."""
        self._tenants = tenants
        self._after = array("I", range(len(tenants)))  # a slot that is not here points at itself
        self._before = array("I", range(len(tenants)))
        self._rings: dict[int, Ring] = {}
        self._spare: list[int] = []  # ends of rings that are gone

    def count(self, tenant: TenantId) -> int:
        """How many it can give up."""
        ring = self._rings.get(tenant)
        return 0 if ring is None else ring.count

    def first(self, tenant: TenantId) -> int:
        """The next to go. Raises KeyError if it has none."""
        end = self._rings[tenant].end
        slot = self._after[end]
        return slot if slot != end else self._after[end + 1]

    def first_unpinned(self, tenant: TenantId) -> int | None:
        """The next to go that is not pinned, if it has one."""
        ring = self._rings.get(tenant)
        if ring is None or self._after[ring.end] == ring.end:
            return None
        return self._after[ring.end]

    def put(self, slot: int, *, pinned: bool) -> None:
        """Add a block, or refresh it: of its kind it is now the last to go."""
        ring = self._joined(slot)
        if ring is not None:
            self._link(slot, ring.end + pinned)

    def demote(self, slot: int) -> None:
        """It is now the next to go."""
        ring = self._joined(slot)
        if ring is not None:
            self._link(slot, self._after[ring.end])

    def tuck(self, slot: int, before: int) -> None:
        """It now goes just before that other one, if both are here and the same tenant's."""
        both = self._after[slot] != slot and self._after[before] != before
        if both and slot != before and self._tenants[slot] == self._tenants[before]:
            self._joined(slot)
            self._link(slot, before)

    def drop(self, slot: int) -> None:
        """It cannot go any more. One that is not here is no error."""
        after = self._after[slot]
        if after == slot:
            return
        before = self._before[slot]
        self._after[before], self._before[after] = after, before
        self._after[slot] = self._before[slot] = slot
        ring = self._rings[self._tenants[slot]]
        ring.count -= 1
        if not ring.count:
            self._spare.append(ring.end)
            del self._rings[self._tenants[slot]]

    def _joined(self, slot: int) -> Ring | None:
        """The ring that now counts this slot, which is yet to be linked there. None if it is no tenant's."""
        self.drop(slot)
        tenant = self._tenants[slot]
        if tenant == NO_TENANT:
            return None
        ring = self._rings.get(tenant)
        if ring is None:
            ring = self._rings[tenant] = Ring(self._spare.pop() if self._spare else self._new_end())
        ring.count += 1
        return ring

    def _new_end(self) -> int:
        end = len(self._after)
        self._after.extend((end, end + 1))
        self._before.extend((end, end + 1))
        return end

    def _link(self, slot: int, after: int) -> None:
        """As the last before that one."""
        before = self._before[after]
        self._after[before] = self._before[after] = slot
        self._before[slot], self._after[slot] = before, after

    def __iter__(self) -> Iterator[int]:
        """All of them; of each tenant those that go first come first."""
        return (slot for ring in self._rings.values() for slot in self._slots(ring))

    def _slots(self, ring: Ring) -> Iterator[int]:
        for end in (ring.end, ring.end + 1):
            slot = self._after[end]
            while slot != end:
                yield slot
                slot = self._after[slot]

    def check(self, slots: Iterable[int]) -> None:
        """Asserts that it has those of `slots` that are tenants', each ring its own, and that no end is lost."""
        assert set(self) == {slot for slot in slots if self._tenants[slot] != NO_TENANT}
        for tenant, ring in self._rings.items():
            assert [self._tenants[slot] for slot in self._slots(ring)] == [tenant] * ring.count
            assert ring.count, "an empty ring is kept"
        assert all(self._before[after] == slot for slot, after in enumerate(self._after))
        ends = [*self._spare, *(ring.end for ring in self._rings.values())]
        assert sorted(ends) == list(range(len(self._tenants), len(self._after), 2))
