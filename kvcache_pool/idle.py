"""The cached blocks of a segment that no lease names: which of them goes next, and which may not. Pure.

    demoted ──> in the order of eviction ──> soft pins ──> (hard pins never)

Who has taken a copy of a prefix to another segment *demotes* it here, also its end first: the next use is expected
there, and until then both hold what one could. A prefix that is hot in both is soon touched again, and one that is
hot everywhere is everywhere, so nobody copies it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvcache_pool.api import PinKind
from kvcache_pool.eviction import Order
from kvcache_pool.owned import Owned
from kvcache_pool.pins import Pins
from protocol.ids import BlockHash, TenantId


class Idle:
    """Idle blocks by their slots. Owns the order, and the pins of all blocks of the segment, leased ones too.

    Mutates: touch, demote, tuck, drop, forget, take, take_own, pin, unpin, end_pins. Every operation costs what it
    costs in the order.
    """

    def __init__(self, order: Order, hard_max: int, owned: Owned | None = None) -> None:
        """`owned` is kept where tenants have quotas: it has all that may be evicted."""
        self._order = order
        self._owned = owned
        self._pins = Pins(hard_max)
        self._demoted: OrderedDict[int, None] = OrderedDict()
        self._soft: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._hard: set[int] = set()

    def __len__(self) -> int:
        return self.evictable + len(self._hard)

    def __contains__(self, slot: int) -> bool:
        return self.may_go(slot) or slot in self._hard

    def __iter__(self) -> Iterator[int]:
        """Those that go first come first."""
        for slots in (self._demoted, self._order, self._soft, self._hard):
            yield from slots

    @property
    def evictable(self) -> int:
        """How many may be evicted."""
        return self.unpinned + len(self._soft)

    @property
    def unpinned(self) -> int:
        """How many may be evicted without regret."""
        return len(self._demoted) + len(self._order)

    @property
    def next_unpinned(self) -> int | None:
        """The next to go that is not pinned."""
        return next(iter(self._demoted)) if self._demoted else self._order.first()

    @property
    def hard_room(self) -> int:
        """Hard pins that can still be put."""
        return self._pins.hard_room

    @property
    def pinned(self) -> int:
        """Blocks of the segment that are pinned, idle or leased."""
        return len(self._pins)

    def is_demoted(self, slot: int) -> bool:
        """Whether its use is expected elsewhere."""
        return slot in self._demoted

    def may_go(self, slot: int) -> bool:
        """Whether it is here and may be evicted."""
        return slot in self._order or slot in self._demoted or slot in self._soft

    def touch(self, slot: int, name: BlockHash, depth: int | None = None) -> None:
        """Add a block, or refresh it: it has just been used. See Order."""
        if self._demoted:
            self._demoted.pop(slot, None)
        pin = self._pins.kind(slot) if self._pins else None
        if pin is None:
            self._order.touch(slot, name, depth)
        elif pin is PinKind.SOFT:
            self._soft[slot] = None
            self._soft.move_to_end(slot)
        else:
            self._hard.add(slot)
        if self._owned is not None and pin is not PinKind.HARD:
            self._owned.put(slot, pinned=pin is not None)

    def demote(self, slot: int) -> None:
        """It is now the next to go, if it is here and not pinned."""
        if slot in self._order or slot in self._demoted:
            self._order.drop(slot)
            self._demoted[slot] = None
            self._demoted.move_to_end(slot, last=False)
            if self._owned is not None:
                self._owned.demote(slot)

    def tuck(self, slot: int, before: int | None, own: int | None) -> None:
        """Let a block that has just been touched go before that other one, if both are here and not pinned, and
        the order can do so; and of its tenant's before its `own`."""
        if before is not None and slot in self._order and before in self._order:
            self._order.tuck(slot, before)
        if self._owned is not None and own is not None and slot in self._order and own in self._order:
            self._owned.tuck(slot, own)

    def drop(self, slot: int) -> None:
        """A lease names it now. A block that is not here is no error."""
        self._order.drop(slot)
        if self._demoted:
            self._demoted.pop(slot, None)
        if self._soft:
            self._soft.pop(slot, None)
        self._hard.discard(slot)
        if self._owned is not None:
            self._owned.drop(slot)

    def forget(self, slot: int) -> None:
        """The slot holds another block from now on, or none; pins end."""
        self.drop(slot)
        self._order.forget(slot)
        self._pins.drop(slot)

    def take(self) -> int:
        """Remove, forget and return the next to go. Raises KeyError when there is none."""
        if self._demoted:
            slot = next(iter(self._demoted))
        elif len(self._order) or not self._soft:
            slot = self._order.take()
        else:
            slot = next(iter(self._soft))
        self.forget(slot)
        return slot

    def own(self, tenant: TenantId) -> int:
        """How many of this tenant's may be evicted, where tenants have quotas."""
        return self._owned.count(tenant) if self._owned is not None else 0

    def next_own(self, tenant: TenantId) -> int | None:
        """Of these the next to go that is not pinned."""
        return self._owned.first_unpinned(tenant) if self._owned is not None else None

    def take_own(self, tenant: TenantId) -> int:
        """As `take`, of this tenant's alone: see Owned. Raises KeyError when it has none."""
        if self._owned is None:
            raise KeyError("no tenant has a quota")
        slot = self._owned.first(tenant)
        self.forget(slot)
        return slot

    def pin(self, slot: int, name: BlockHash, kind: PinKind, end: float) -> bool:
        """Pin a block, idle or not. False if that would be one hard pin too many."""
        idle = slot in self
        if not self._pins.put(slot, kind, end):
            return False
        if idle:
            self.drop(slot)
            self.touch(slot, name)
        return True

    def unpin(self, slot: int, name: BlockHash) -> bool:
        """It goes as all others do, from now on as if just used. False if it was not pinned."""
        if not self._pins.drop(slot):
            return False
        if slot in self._soft or slot in self._hard:
            self.drop(slot)
            self.touch(slot, name)
        return True

    def kind(self, slot: int) -> PinKind | None:
        """How a block is pinned, if it is."""
        return self._pins.kind(slot)

    def pin_of(self, slot: int) -> tuple[PinKind, float] | None:
        """How a block is pinned, and until when."""
        return self._pins.get(slot)

    def end_pins(self, now: float, names: Sequence[BlockHash | None]) -> None:
        """End the pins whose time is over. `names` has the name of each slot's block."""
        for slot in self._pins.over(now):
            name = names[slot]
            if name is not None and (slot in self._soft or slot in self._hard):
                self.drop(slot)
                self.touch(slot, name)

    def check(self) -> None:
        """Asserts that each idle block is in one place, the one of its pin."""
        self._pins.check()
        order = set(self._order)
        assert len(order) == len(self._order)
        assert len(order) + len(self._demoted) + len(self._soft) + len(self._hard) == len(set(self)) == len(self)
        assert all(self.kind(slot) is None for slot in [*order, *self._demoted])
        assert all(self.kind(slot) is PinKind.SOFT for slot in self._soft)
        assert all(self.kind(slot) is PinKind.HARD for slot in self._hard)
        if self._owned is not None:
            self._owned.check(slot for slot in self if self.may_go(slot))
