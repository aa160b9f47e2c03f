"""Many runs at once between a mapped segment and somebody's memory: a long copy, then its hashes, and so on.

A *unit* is what one grant moves: `span.width` neighbouring layers of one slot, which lie in one piece in the
segment. On the other side are `units[row]`, each [width, run_bytes]: pages of one layer, or whole blocks.

    slots   7 8 9 | 21 | 3 4        one copy for each stretch of slots and rows that are neighbours on both sides,
    rows    0 1 2 |  3 | 8 9        none longer than what the next step, the hash, finds in the core's cache

Why this is as safe as one run at a time: `segment.py` says what a writer and a reader do, and in which order; here
each step is done for all runs of a stretch before the next step. The reader still hashes its own copy.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvcache_pool.api import Corrupt, Grant
from kvcache_pool.segment import Bytes, Memory

Units = Bytes | Sequence[Bytes]
"""What lies on the other side: an array [count, width, run_bytes], or arrays [width, run_bytes] that lie anywhere.
A run is contiguous in each."""


STRETCH_BYTES = 384 << 10
"""Copied before it is hashed. Both ends of it fit the second cache of a core (1 MB of most servers): the hash of
11.8 MB that were copied whole takes 2.5 times as long."""


class Span(NamedTuple):
    """Some neighbouring layers of a slot."""

    first: int
    width: int


class Copies:
    """One segment's runs. Functions run in any thread and hold no lock. The memory is another's."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._slots = memory.geometry.slots
        self._layers = memory.geometry.layout.layers
        self._run_bytes = memory.geometry.layout.run_bytes
        self._generations = memory.generations.data
        self._checksums = memory.checksums.reshape(-1).data  # [slots * layers]; entries cost no array

    def require(self, grants: Sequence[Grant]) -> int:
        """How many leading grants have their slot's generation."""
        table, slots = self._generations, self._slots
        for count, (_, slot, generation) in enumerate(grants):
            if not 0 <= slot < slots or table[slot] != generation:
                return count
        return len(grants)

    def claim(self, grants: Sequence[Grant]) -> None:
        """A writer with these generations begins. Raises Stale before any is claimed."""
        for _, slot, generation in grants:
            if not 0 <= slot < self._slots or self._generations[slot] > generation:
                self._memory.claim(slot, generation)  # says what is wrong
        for _, slot, generation in grants:
            if self._generations[slot] > generation:  # a newer writer came in between: never back
                self._memory.claim(slot, generation)
            self._generations[slot] = generation

    def get(self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int]) -> int:
        """Copy units out and verify them. Returns how many leading ones are good; the rest is garbage."""
        valid = self.require(grants)
        grants, rows = grants[:valid], rows[:valid]
        slots, found = self._memory.runs[:, span.first : span.first + span.width], list[int]()
        for start, end in self._stretches(span, grants, rows, units):
            from_slot, to_row = grants[start].slot, rows[start]
            if isinstance(units, np.ndarray):
                np.copyto(units[to_row : to_row + end - start], slots[from_slot : from_slot + end - start])
            else:
                np.copyto(units[to_row], slots[from_slot])
            found += digests(grants[start:end], units, rows[start:end])
        return same(found, self.checksums(span, grants), span.width)

    def put(self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int]) -> None:
        """Copy units in, with their checksums. Raises Stale; nothing was written then."""
        self.claim(grants)
        for start, end in self._stretches(span, grants, rows, units):
            mine, its_rows = grants[start:end], rows[start:end]
            self._copy_in(span, mine, units, its_rows)
            self._note(span, mine, digests(mine, units, its_rows))

    def put_verified(self, span: Span, grants: Sequence[Grant], units: Bytes, expected: Sequence[int]) -> None:
        """As `put`, of all `units`, that came with their checksums. Raises Stale, or Corrupt if one changed on its
        way; nothing was written then."""
        rows = range(len(grants))
        good = same(digests(grants, units, rows), expected, span.width)
        if good < len(grants):
            raise Corrupt(f"layers from {span.first} for slot {grants[good].slot} changed on their way")
        self.claim(grants)
        for start, end in self._stretches(span, grants, rows, units):
            self._copy_in(span, grants[start:end], units, rows[start:end])
        self._note(span, grants, expected)

    def _copy_in(self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int]) -> None:
        """One stretch."""
        slots = self._memory.runs[:, span.first : span.first + span.width]
        to_slot, from_row, count = grants[0].slot, rows[0], len(grants)
        if isinstance(units, np.ndarray):
            np.copyto(slots[to_slot : to_slot + count], units[from_row : from_row + count])
        else:
            np.copyto(slots[to_slot], units[from_row])

    def _stretches(
        self, span: Span, grants: Sequence[Grant], rows: Sequence[int], units: Units
    ) -> Iterator[tuple[int, int]]:
        most = STRETCH_BYTES // (span.width * self._run_bytes) if isinstance(units, np.ndarray) else 1
        return stretches(grants, rows, max(1, most))

    def views(self, span: Span, grants: Sequence[Grant]) -> list[memoryview]:
        """The memory of these units, one view each."""
        runs, end = self._memory.runs, span.first + span.width
        return [runs[slot, span.first : end].reshape(-1).data for _, slot, _ in grants]

    def checksums(self, span: Span, grants: Sequence[Grant]) -> list[int]:
        """As they are noted, of all runs of these units in order."""
        found: list[int] = []
        for _, slot, _ in grants:
            at = slot * self._layers + span.first
            found += self._checksums[at : at + span.width].tolist()
        return found

    def _note(self, span: Span, grants: Sequence[Grant], found: Sequence[int]) -> None:
        numbers = iter(found)
        for _, slot, _ in grants:
            for at in range(slot * self._layers + span.first, slot * self._layers + span.first + span.width):
                self._checksums[at] = next(numbers)


def stretches(grants: Sequence[Grant], rows: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """(start, end) of grants that are neighbours on both sides, at most so many."""
    start = 0
    for end in range(1, len(grants) + 1):
        ahead = end - start
        if (
            end == len(grants)
            or ahead == most
            or grants[end][1] != grants[start][1] + ahead
            or rows[end] != rows[start] + ahead
        ):
            yield start, end
            start = end


def unit_views(units: Units, rows: Sequence[int]) -> list[memoryview]:
    """All bytes of these rows, in order, in as few views as they lie in pieces."""
    if isinstance(units, np.ndarray) and units.flags.c_contiguous and rows:
        unit, flat = units[0].nbytes, units.data.cast("B")
        if all(row == rows[0] + ahead for ahead, row in enumerate(rows)):
            return [flat[rows[0] * unit : (rows[-1] + 1) * unit]]
        return [flat[row * unit : (row + 1) * unit] for row in rows]
    if all(units[row].flags.c_contiguous for row in rows):
        return [units[row].reshape(-1).data for row in rows]
    return run_views(units, rows)


def run_views(units: Units, rows: Sequence[int]) -> list[memoryview]:
    """Every run of these rows, in order."""
    return [run for row in rows for run in _runs(units[row])]


def _runs(unit: Bytes) -> list[memoryview]:
    if not unit.flags.c_contiguous:
        return [run.data for run in unit]
    flat, run_bytes = unit.data.cast("B"), unit.shape[1]
    return [flat[at : at + run_bytes] for at in range(0, len(flat), run_bytes)]


def digests(grants: Sequence[Grant], units: Units, rows: Sequence[int]) -> list[int]:
    """The checksum of each run of these rows, in order. As `segment.checksum`."""
    hashed, found = xxhash.xxh3_64_intdigest, list[int]()
    if isinstance(units, np.ndarray) and units.flags.c_contiguous and rows:
        _, width, run_bytes = units.shape
        flat, unit = units.data.cast("B"), width * run_bytes
        for (_, _, generation), row in zip(grants, rows, strict=True):
            starts = range(row * unit, (row + 1) * unit, run_bytes)
            found += [hashed(flat[at : at + run_bytes], generation) for at in starts]  # a view for each costs most
        return found
    for (_, _, generation), row in zip(grants, rows, strict=True):
        found += [hashed(run, generation) for run in _runs(units[row])]
    return found


def same(found: Sequence[int], expected: Sequence[int], width: int) -> int:
    """How many leading units, of `width` checksums each, are equal on both sides."""
    if found == expected:
        return len(found) // width
    pairs = zip(found, expected, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(found)) // width
