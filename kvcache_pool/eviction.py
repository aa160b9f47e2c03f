"""Which cached block of a segment goes first when room is needed. Pure.

The law of `LeastRecent`, the default: the least recently used goes first, and of one prefix its end before its
front, since a block is worth nothing without those before it. Whoever uses a prefix therefore touches it from
last to first. Its rivals have the same interface, and keep ends before fronts as far as their own rule lets them.
How they compare on the public traces is in docs/results.md (`dango sim hit-rates --rivals`).
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Protocol

from protocol.ids import BlockHash

NO_NAME = BlockHash(b"")
"""For an order that asks for none."""

DEPTH_WEIGHT = 1 / 256
"""Of `LengthAware`: how much older each block before it in its prompt makes a block look, as a share of the time
in which the whole segment is used once."""

SMALL_SHARE = 0.1
"""Of `S3Fifo`: the part of a segment in which a new block must prove itself, as in its paper (SOSP 2023)."""

USES_MAX = 3
"""Of `S3Fifo`: so many uses of a block are counted, in two bits, as in its paper."""

USES_TO_STAY = 2
"""Of `S3Fifo`: so many uses prove a new block."""


class Order(Protocol):
    """The blocks of one segment that may be evicted, by their slots, in the order in which they will be.

    Always: holds exactly those that were touched and since neither dropped, forgotten nor taken.
    """

    def __init__(self, slots: int) -> None:
        """None yet, of so many slots."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, slot: int) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """About in order: the next to go comes early."""
        ...

    def touch(self, slot: int, name: BlockHash, depth: int | None) -> None:
        """Add a block, or refresh it: it has just been used. `depth` counts the blocks before it in its prompt;
        None leaves it as it was."""
        ...

    def first(self) -> int | None:
        """About the next to go. None when there is none."""
        ...

    def tuck(self, slot: int, before: int) -> None:
        """Of two that are here: the first goes before the other, if the order is one of times alone."""
        ...

    def drop(self, slot: int) -> None:
        """A lease names it now; its past counts when it comes back. One that is not here is no error."""
        ...

    def forget(self, slot: int) -> None:
        """What the slot held is gone, and with it its past."""
        ...

    def take(self) -> int:
        """Remove and return the next to go, and forget it. Raises KeyError when there is none."""
        ...


class LeastRecent:
    """A ring of slots, each with the one before and the one after it: 8 bytes a slot. Every operation is O(1)."""

    def __init__(self, slots: int) -> None:
        self._end = slots  # stands between the last to go and the first
        self._count = 0
        self._after = array("I", range(slots + 1))  # a slot that is not here points at itself
        self._before = array("I", range(slots + 1))

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return self._after[slot] != slot

    def __iter__(self) -> Iterator[int]:
        slot = self._after[self._end]
        while slot != self._end:
            yield slot
            slot = self._after[slot]

    def touch(self, slot: int, name: BlockHash = NO_NAME, depth: int | None = None) -> None:
        """See Order: it is now the last to go."""
        self._insert(slot, self._end)

    def first(self) -> int | None:
        """See Order."""
        return next(iter(self), None)

    def tuck(self, slot: int, before: int) -> None:
        """See Order."""
        if slot != before:
            self._insert(slot, before)

    def _insert(self, slot: int, after: int) -> None:
        self.drop(slot)
        before = self._before[after]
        self._after[before] = self._before[after] = slot
        self._before[slot], self._after[slot] = before, after
        self._count += 1

    def drop(self, slot: int) -> None:
        """See Order."""
        after = self._after[slot]
        if after != slot:
            before = self._before[slot]
            self._after[before], self._before[after] = after, before
            self._after[slot] = self._before[slot] = slot
            self._count -= 1

    forget = drop

    def take(self) -> int:
        """See Order."""
        slot = self._after[self._end]
        if slot == self._end:
            raise KeyError("nothing can be evicted")
        self.drop(slot)
        return slot


class LeastUsed:
    """LFU: whose uses are fewest goes first; of equals the least recent. Uses are never forgotten while the block
    is cached, so what was once popular stays for long. Every operation is O(log of the largest count)."""

    def __init__(self, slots: int) -> None:
        self._uses = array("I", bytes(4 * slots))
        self._by_uses: dict[int, OrderedDict[int, None]] = {}
        self._counts: list[int] = []  # a heap of the keys above
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return slot in self._by_uses.get(self._uses[slot], ())

    def __iter__(self) -> Iterator[int]:
        for uses in sorted(self._by_uses):
            yield from self._by_uses[uses]

    def touch(self, slot: int, name: BlockHash, depth: int | None) -> None:
        """See Order: one use more."""
        self.drop(slot)
        self._uses[slot] += 1
        uses = self._uses[slot]
        if uses not in self._by_uses:
            self._by_uses[uses] = OrderedDict()
            heapq.heappush(self._counts, uses)
        self._by_uses[uses][slot] = None
        self._count += 1

    def first(self) -> int | None:
        """See Order."""
        return next(iter(self), None)

    def tuck(self, slot: int, before: int) -> None:
        """See Order: uses count here."""

    def drop(self, slot: int) -> None:
        """See Order."""
        if slot in self:
            del self._by_uses[self._uses[slot]][slot]
            self._count -= 1

    def forget(self, slot: int) -> None:
        """See Order."""
        self.drop(slot)
        self._uses[slot] = 0

    def take(self) -> int:
        """See Order."""
        while self._counts and not self._by_uses[self._counts[0]]:
            del self._by_uses[heapq.heappop(self._counts)]
        if not self._counts:
            raise KeyError("nothing can be evicted")
        slot = next(iter(self._by_uses[self._counts[0]]))
        self.forget(slot)
        return slot


class LengthAware:
    """LRU in which a block looks older the deeper it lies in its prompt (DEPTH_WEIGHT): of the old ones the ends
    of long prompts go first, which cost most room and are least likely to be shared. Every operation is O(log
    blocks)."""

    def __init__(self, slots: int) -> None:
        self._weight = slots * DEPTH_WEIGHT
        self._depths = array("I", bytes(4 * slots))
        self._touches = 0
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # also keys that count no more

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, slot: int) -> bool:
        return slot in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def touch(self, slot: int, name: BlockHash, depth: int | None) -> None:
        """See Order."""
        if depth is not None:
            self._depths[slot] = depth
        self._touches += 1
        key = self._touches - self._weight * self._depths[slot]
        self._keys[slot] = key
        heapq.heappush(self._heap, (key, slot))
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(key, slot) for slot, key in self._keys.items()]
            heapq.heapify(self._heap)

    def first(self) -> int | None:
        """See Order."""
        while self._heap and self._keys.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def tuck(self, slot: int, before: int) -> None:
        """See Order: uses count here."""

    def drop(self, slot: int) -> None:
        """See Order."""
        self._keys.pop(slot, None)

    forget = drop

    def take(self) -> int:
        """See Order."""
        while self._heap:
            key, slot = heapq.heappop(self._heap)
            if self._keys.get(slot) == key:
                del self._keys[slot]
                return slot
        raise KeyError("nothing can be evicted")


class S3Fifo:
    """Two queues in the order of arrival. A new block waits in the small one: when its turn comes it goes, unless
    it was used USES_TO_STAY times since; then it moves to the main one, where each use buys another round. Who
    comes back soon after going (its name is still a *ghost*) enters the main one at once. A scan of new prompts
    thus passes by what is in use. A leased block keeps its place; if its turn comes meanwhile, it enters the main
    queue afterwards. Every operation is O(1) in the mean."""

    def __init__(self, slots: int) -> None:
        self._small_max = int(slots * SMALL_SHARE)
        self._ghosts_max = slots - self._small_max
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._names: dict[int, BlockHash] = {}  # of all that were touched and not forgotten
        self._uses = bytearray(slots)
        self._here: set[int] = set()  # those in the queues but for the leased ones

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, slot: int) -> bool:
        return slot in self._here

    def __iter__(self) -> Iterator[int]:
        return (slot for queue in (self._small, self._main) for slot in queue if slot in self._here)

    def touch(self, slot: int, name: BlockHash, depth: int | None) -> None:
        """See Order."""
        self._here.add(slot)
        if slot in self._small or slot in self._main:
            self._uses[slot] = min(self._uses[slot] + 1, USES_MAX)
        elif slot in self._names or name in self._ghosts:
            self._ghosts.pop(name, None)
            self._main[slot] = None
        else:
            self._small[slot] = None
        self._names[slot] = name

    def first(self) -> int | None:
        """See Order."""
        return next(iter(self), None)

    def tuck(self, slot: int, before: int) -> None:
        """See Order: uses count here."""

    def drop(self, slot: int) -> None:
        """See Order."""
        self._here.discard(slot)

    def forget(self, slot: int) -> None:
        """See Order."""
        self._here.discard(slot)
        self._small.pop(slot, None)
        self._main.pop(slot, None)
        self._names.pop(slot, None)
        self._uses[slot] = 0

    def take(self) -> int:
        """See Order."""
        if not self._here:
            raise KeyError("nothing can be evicted")
        while True:
            small = len(self._small) > self._small_max or not self._main
            slot, _ = (self._small if small else self._main).popitem(last=False)
            if slot not in self._here:
                continue  # leased
            uses = self._uses[slot]
            if small and uses >= USES_TO_STAY:
                self._main[slot], self._uses[slot] = None, 0
            elif not small and uses:
                self._main[slot], self._uses[slot] = None, uses - 1
            else:
                if small:
                    self._remember(self._names[slot])
                self.forget(slot)
                return slot

    def _remember(self, name: BlockHash) -> None:
        self._ghosts[name] = None
        self._ghosts.move_to_end(name)
        if len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)


EVICTIONS: Mapping[str, type[Order]] = {
    "lru": LeastRecent,
    "lfu": LeastUsed,
    "length_aware": LengthAware,
    "s3_fifo": S3Fifo,
}
"""By the names that the setting `eviction` has."""
