"""Is what the pool believes to hold really there? For operators, while the pool runs and after it has died."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcache_pool.api import Corrupt, Note, Stale
from kvcache_pool.geometry import Geometry
from kvcache_pool.segment import SHM, Memory, segment_files
from protocol.ids import Incarnation, SegmentId


@dataclass(frozen=True)
class Fault:
    """One block that is not what its name says."""

    segment: SegmentId
    slot: int
    name: bytes
    reason: str


@dataclass(frozen=True)
class Opened:
    """A segment's file, mapped. Nothing in it is changed."""

    path: Path
    segment: SegmentId
    incarnation: Incarnation
    memory: Memory


def open_segment(path: Path) -> Opened:
    """Map a file, whoever owns it, dead or alive. Raises OSError, or ValueError for what is no segment."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        segment, incarnation, geometry = Geometry.of(file)
        return Opened(path, segment, incarnation, Memory(file, geometry))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    finally:
        os.close(file)


def found_files(folders: Iterable[Path] = (SHM,)) -> list[Path]:
    """The files of this user's segments."""
    return [path for folder in folders for path in segment_files(folder)]


def verify(opened: Opened, notes: Iterable[Note]) -> Iterator[Fault]:
    """Read every layer of these blocks, and tell of each that cannot be read as it was written."""
    layout = opened.memory.geometry.layout
    run = np.empty(layout.run_bytes, np.uint8)
    for note in notes:
        for layer in range(layout.layers):
            try:
                opened.memory.get(layer, note.slot, note.generation, run)
            except (Stale, Corrupt) as error:
                yield Fault(opened.segment, note.slot, note.name, str(error))
                break


@dataclass(frozen=True)
class Checked:
    """What the check of one segment found."""

    segment: SegmentId
    blocks: int
    """That were read and verified, all layers of each."""
    faults: list[Fault]
    reason: str = ""
    """Why it could not be checked at all; empty if it was."""


def check_file(path: Path) -> Checked:
    """A file against its own notes: what the next life of its owner would take over."""
    try:
        opened = open_segment(path)
    except (OSError, ValueError) as error:
        return Checked(SegmentId(path.name), 0, [], str(error))
    notes = opened.memory.noted()
    return Checked(opened.segment, len(notes), list(verify(opened, notes)))


async def check_segment(
    segment: SegmentId,
    incarnation: Incarnation,
    files: Sequence[Path],
    catalogue: Callable[[], Awaitable[list[Note]]],
) -> Checked:
    """What the directory believes of a living segment against its file. What was evicted between asking and
    reading is no fault: what seems wrong is asked for once more."""
    opened = _file_of(segment, incarnation, files)
    if opened is None:
        return Checked(segment, 0, [], "its file is not here: check it on its own host, as its user")
    notes = await catalogue()
    faults = await asyncio.to_thread(lambda: list(verify(opened, notes)))
    if faults:
        still = set(await catalogue())
        suspects = {(fault.slot, fault.name) for fault in faults}
        again = [note for note in notes if (note.slot, note.name) in suspects and note in still]
        faults = await asyncio.to_thread(lambda: list(verify(opened, again)))
    return Checked(segment, len(notes), faults)


def _file_of(segment: SegmentId, incarnation: Incarnation, files: Sequence[Path]) -> Opened | None:
    for path in files:
        try:
            opened = open_segment(path)
        except (OSError, ValueError):
            continue
        if (opened.segment, opened.incarnation) == (segment, incarnation):
            return opened
    return None
