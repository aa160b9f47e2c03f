"""What the pool tells others of its blocks: KV events as vLLM publishes them. Pure: time comes in as `ts`.

    Index ──stored, removed──> Events ──flush──> numbered batches ──> Publisher
                                 └─ the last of them are kept, for whoever missed some

To the outside the pool is one cache: a name is *stored* when its first replica appears and *removed* when the
last one goes. What one call of the directory changed becomes one batch, in the order in which it happened; a
large change becomes several. A batch is msgpack `[ts, events, data_parallel_rank, incarnation]`; the last element
is ours, and who knows nothing of it ignores it. The first batch of a life has number 0 and says that nothing is
cached.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar

from protocol.ids import BlockHash, Ids, Incarnation, token_ids
from protocol.message import pack

RING_BATCHES = 10_000
"""Batches that are kept for who asks again: as many as vLLM keeps."""

RING_BYTES_MAX = 64 << 20
"""Of the kept batches together: room for the names of half a million blocks with their tokens."""

NAMES_MAX = 1024
"""Of one batch: 35 KB of names and, at 16 tokens a block, 80 KB of tokens. A larger change takes several."""

CPU = "CPU"
DISK = "DISK"
"""The medium of a name: that of its first replica, until its last goes."""

Form = Literal["map", "array"]
"""How one event travels: as a map of its fields, with its class's name under `type` (vLLM since June 2026), or as
an array of their values after that name (vLLM before)."""

T = TypeVar("T")
Event = dict[str, Any]
CLEARED: Event = {"type": "AllBlocksCleared"}


class Recorder:
    """Hears from the index which names the pool gains and loses. This one ignores it."""

    def stored(self, name: BlockHash, medium: str = CPU) -> None:
        """The name got its first replica, on this medium."""

    def removed(self, name: BlockHash) -> None:
        """The name lost its last replica."""


class Events(Recorder):
    """Changes that are not told yet, and batches that were. Mutates: all but `pending` and `since`.

    Owns no truth: the index does. Always: the kept batches are numbered without a gap, up to the newest.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        block_tokens: int,
        form: Form = "map",
        *,
        ring_batches: int = RING_BATCHES,
        ring_bytes: int = RING_BYTES_MAX,
    ) -> None:
        """`incarnation` is the directory's; `ring_batches` and `ring_bytes` bound what is kept."""
        self._incarnation = incarnation
        self._block_tokens = block_tokens
        self._form = form
        self._ring_batches = ring_batches
        self._ring_bytes = ring_bytes
        self._changes: list[
            tuple[str | None, str, list[BlockHash]]
        ] = []  # (medium, kind, names), the oldest first
        self._cleared = True  # before all changes
        self._elsewhere: dict[BlockHash, str] = {}  # the medium of each name that is not on CPU
        self._told: Sequence[BlockHash] = ()
        self._places: dict[BlockHash, int] = {}  # where a name stands in `_told`
        self._tokens = token_ids()
        self._parent: BlockHash | None = None
        self._ring: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self.number = 0
        """Of the next batch."""
        self.dropped = 0
        """Batches that are kept no more."""

    # -- what happens -------------------------------------------------------------------------------

    def tell(self, blocks: Sequence[BlockHash], tokens: Ids, parent: BlockHash | None) -> None:
        """What is known of blocks in a row, of which some may be stored before the next flush: their tokens, and
        the name before the first. Raises ValueError when these are not the tokens of so many blocks."""
        if len(tokens) != len(blocks) * self._block_tokens:
            raise ValueError(
                f"{len(blocks)} blocks of {self._block_tokens} tokens do not have {len(tokens)} tokens"
            )
        self._told, self._tokens, self._parent = blocks, tokens, parent
        self._places = {name: place for place, name in enumerate(blocks)}

    def stored(self, name: BlockHash, medium: str = CPU) -> None:
        if medium != CPU:
            self._elsewhere[name] = medium
        self._change("BlockStored", medium, name)

    def removed(self, name: BlockHash) -> None:
        self._change("BlockRemoved", self._elsewhere.pop(name, CPU), name)

    def _change(self, kind: str, medium: str, name: BlockHash) -> None:
        if not self._changes or self._changes[-1][:2] != (medium, kind):
            self._changes.append((medium, kind, []))
        self._changes[-1][2].append(name)

    def cleared(self) -> None:
        """Nothing is cached any more: that is told instead of each name that went."""
        self._changes.clear()
        self._elsewhere.clear()
        self._cleared = True

    # -- what is told -------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there is anything to tell."""
        return self._cleared or bool(self._changes)

    def flush(self, ts: float) -> list[tuple[int, bytes]]:
        """The batches that tell what has happened since the last flush, with their numbers. `ts` is in seconds
        since 1970."""
        batches = [self._batch(ts, events) for events in _parted(self._events())]
        self._changes.clear()
        self._cleared = False
        self._told, self._places, self._tokens, self._parent = (), {}, token_ids(), None
        return batches

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """The kept batches from this number on, the oldest first."""
        first = self.number - len(self._ring)
        return [*islice(self._ring, max(0, min(number, self.number) - first), None)]

    def _batch(self, ts: float, events: list[Event]) -> tuple[int, bytes]:
        told = events if self._form == "map" else [[*event.values()] for event in events]
        batch = self.number, pack([ts, told, 0, self._incarnation])
        self.number += 1
        self._ring.append(batch)
        self._bytes += len(batch[1])
        while len(self._ring) > self._ring_batches or self._bytes > self._ring_bytes:
            self._bytes -= len(self._ring.popleft()[1])
            self.dropped += 1
        return batch

    def _events(self) -> Iterator[Event]:
        """At most NAMES_MAX names each."""
        if self._cleared:
            yield CLEARED
        for medium, kind, names in self._changes:
            if kind == "BlockRemoved":
                for part in _parts(names):
                    yield {"type": kind, "block_hashes": part, "medium": medium}
                continue
            known = sorted(self._places[name] for name in names if name in self._places)
            for row in _rows(known):
                for places in _parts(row):
                    yield self._stored(medium, places)
            for part in _parts([name for name in names if name not in self._places]):
                yield self._stored_event(medium, part)

    def _stored(self, medium: str | None, places: Sequence[int]) -> Event:
        """Of blocks in a row, whose tokens are known."""
        first, end, step = places[0], places[-1] + 1, self._block_tokens
        parent = self._told[first - 1] if first else self._parent
        tokens = self._tokens[first * step : end * step].tolist()
        return self._stored_event(medium, [*self._told[first:end]], parent, tokens)

    def _stored_event(
        self,
        medium: str | None,
        names: list[BlockHash],
        parent: BlockHash | None = None,
        tokens: Sequence[int] = (),
    ) -> Event:
        """The order of the fields is vLLM's, and it is the wire format of the form "array"."""
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }


def _rows(places: Iterable[int]) -> Iterator[list[int]]:
    """Rising numbers, cut where one is missing."""
    row: list[int] = []
    for place in places:
        if row and place != row[-1] + 1:
            yield row
            row = []
        row.append(place)
    if row:
        yield row


def _parts(items: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), NAMES_MAX):
        yield items[start : start + NAMES_MAX]


def _parted(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Events by the batch, with at most NAMES_MAX names each."""
    batch: list[Event] = []
    room = NAMES_MAX
    for event in events:
        count = len(event.get("block_hashes", ()))
        if batch and count > room:
            yield batch
            batch, room = [], NAMES_MAX
        batch.append(event)
        room -= count
    if batch:
        yield batch
