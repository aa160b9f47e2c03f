"""Of each name the blocks that have it, in the segments that are there: finding and pinning. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from kvcache_pool.api import Found, PinKind
from kvcache_pool.events import CPU, DISK, Recorder
from kvcache_pool.names import Names, home_of, slot_of
from kvcache_pool.slots import Block, Slots
from protocol.ids import BlockHash, TenantId


class Replicas:
    """All cached blocks, by name; at most one of a name in a segment. Mutates: join, leave, add, remove, pin,
    unpin."""

    def __init__(self, recorder: Recorder) -> None:
        """`recorder` hears of each name's first replica and last."""
        self._recorder = recorder
        self._names = Names()
        self._homes: dict[int, Slots] = {}
        self._tables: dict[int, list[BlockHash | None]] = {}
        self._disks = 0

    def __iter__(self) -> Iterator[BlockHash]:
        """All names."""
        return iter(self._names)

    @property
    def tiered(self) -> bool:
        """Whether there is a disk."""
        return self._disks > 0

    def join(self, slots: Slots) -> None:
        """A segment is there, and holds nothing yet."""
        self._homes[slots.number] = slots
        self._tables[slots.number] = slots.names
        self._disks += slots.on_disk
        if slots.on_disk:
            for home in self._homes.values():
                if not home.on_disk:
                    home.due |= {block.slot: None for block in home.used() if self._is_unsaved(block)}

    def leave(self, slots: Slots) -> None:
        """A segment is gone; its blocks have been removed."""
        del self._homes[slots.number], self._tables[slots.number]
        self._disks -= slots.on_disk
        if not self._disks:
            for home in self._homes.values():
                home.due.clear()

    def add(self, name: BlockHash, block: Block) -> int:
        """It is here too. Returns how many blocks in memory have the name now."""
        count = self._names.add(name, block.where)
        if count == 1:
            self._recorder.stored(name, DISK if block.home.on_disk else CPU)
        if not self._disks:
            return count
        replicas = self.of(name)
        in_memory = [one for one in replicas if not one.home.on_disk]
        if not in_memory or len(in_memory) == len(replicas):
            if in_memory:
                block.home.due[block.slot] = None
        else:
            for one in replicas:
                one.home.due.pop(one.slot, None)
                one.home.read.discard(one.slot)
        return len(in_memory)

    def remove(self, name: BlockHash, block: Block) -> list[Block]:
        """It is here no more. Returns where in memory it still is."""
        block.home.due.pop(block.slot, None)
        others = [self._block(place) for place in self._names.remove(name, block.where)]
        if not others:
            self._recorder.removed(name)
        return [one for one in others if not one.home.on_disk]

    def of(self, name: BlockHash) -> list[Block]:
        """Of this name, the oldest first."""
        return [self._block(place) for place in self._names.places(name)]

    def named(self, block: Block) -> list[Block]:
        """All replicas of this block, itself too, if it has a name."""
        return self.of(block.name) if block.name is not None else []

    def count(self, name: BlockHash) -> int:
        """How many there are of this name."""
        return len(self._names.places(name))

    def tenant(self, name: BlockHash) -> TenantId | None:
        """Whose it is; None for a name that nobody has."""
        places = self._names.places(name)
        return self._block(places[0]).tenant if places else None

    def find(self, blocks: Sequence[BlockHash]) -> Found:
        """The longest unbroken prefix, in all segments together and in each alone."""
        reach, held = self._names.reach(blocks, self._tables)
        return Found(reach, {str(self._homes[home].place.segment): count for home, count in held.items()})

    def choose(self, blocks: Sequence[BlockHash], near: Slots | None) -> list[Block]:
        """One replica of each block of the cached prefix: near, else where the one before was, else the oldest;
        from a segment that is drained only if no other has it, and from a disk only if no memory has it."""
        chosen: list[Block] = []
        last = near
        for name in blocks:
            replicas = self.of(name)
            if not replicas:
                break
            block = replicas[0]
            if len(replicas) > 1:
                replicas = _best(replicas)
                block = replicas[0]
                block = in_segment(near, replicas) or in_segment(last, replicas) or block
            chosen.append(block)
            last = block.home
        return chosen

    def saved(self, block: Block) -> list[Block]:
        """Where disks have what this block in memory holds. To be called when it was used: if none has it any
        more, it is due again, so that a disk too small for all has what is used."""
        name = block.name
        assert name is not None, "what has no name is saved nowhere"
        found = [one for one in self.of(name) if one.home.on_disk]
        if not found:
            block.home.due[block.slot] = None
        return found

    def pin(self, blocks: Iterable[BlockHash], kind: PinKind, end: float) -> int:
        """From the front of a chain to the first that is not cached or would be a hard pin too many; what pin it
        had counts no more. Returns how many are pinned."""
        kept: list[Block] = []
        for name in blocks:
            # The one that has a pin already keeps it, if it can and stays.
            replicas = sorted(self.of(name), key=_unfit_for_pin)
            block = next((one for one in replicas if one.home.idle.pin(one.slot, name, kind, end)), None)
            if block is None:
                break
            kept.append(block)
            for other in replicas:
                if other is not block:
                    other.home.idle.unpin(other.slot, name)
        for block in reversed(kept):
            if block.leases == 0:
                block.touch()
        return len(kept)

    def unpin(self, blocks: Sequence[BlockHash]) -> int:
        """See Index.unpin."""
        replicas = [(block, name) for name in reversed(blocks) for block in self.of(name)]
        return sum(block.home.idle.unpin(block.slot, name) for block, name in replicas)

    def check(self) -> int:
        """Asserts that each name has blocks that say so, one in a segment. Returns how many blocks there are."""
        count = 0
        for name in self:
            replicas = self.of(name)
            assert replicas, "a name without a block"
            assert len({block.home for block in replicas}) == len(replicas), "twice in a segment"
            in_memory = [block for block in replicas if not block.home.on_disk]
            assert len(in_memory) > 1 or not any(block.copy for block in replicas), "nowhere else is no copy"
            if 0 < len(in_memory) < len(replicas):
                assert not any(block.slot in block.home.due for block in replicas), "it is in both tiers"
            assert all(block.name == name and not block.spoiled for block in replicas)
            assert len({block.tenant for block in replicas}) == 1, "two tenants' blocks under one name"
            count += len(replicas)
        return count

    def _is_unsaved(self, block: Block) -> bool:
        name = block.name
        return name is not None and not any(one.home.on_disk for one in self.of(name))

    def _block(self, place: int) -> Block:
        return Block(self._homes[home_of(place)], slot_of(place))


def _best(replicas: list[Block]) -> list[Block]:
    """Those to read from."""
    in_memory = [one for one in replicas if not one.home.on_disk] or replicas
    return [one for one in in_memory if not one.home.draining] or in_memory


def _unfit_for_pin(block: Block) -> tuple[bool, bool]:
    return block.home.draining, block.home.idle.kind(block.slot) is None


def in_segment(slots: Slots | None, replicas: Sequence[Block]) -> Block | None:
    """The one of these that is in this segment, if one is."""
    return next((block for block in replicas if block.home is slots), None)
