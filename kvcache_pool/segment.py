"""A segment: the memory of one node, as a file in /dev/shm that every process of the host can map.

    0            page                                                                          size
    ┌──────────┬──────────────────┬───────────────────────┬────────────┬────────┬────────┬─────┐
    │ header   │ generations      │ checksums             │ notes      │ slot 0 │ slot 1 │ ... │  each part
    │          │ uint64 [slots]   │ uint64 [slots, layers]│ NOTE[slots]│ runs of layer 0, 1, ..│  page aligned
    └──────────┴──────────────────┴───────────────────────┴────────────┴────────┴────────┴─────┘

Why nobody ever reads a wrong byte, without a lock between processes. The directory gives each use of a slot
a generation `g`, greater than all before. A checksum is XXH3 over a run, *seeded with g*.

    writer with g                              reader with g
      table > g ?  refuse (Stale)                table != g ?  bad (Stale)
      table = g                                  copy the run into its own page
      copy the run in                            hash the *copy* with seed g
      checksum = hash(source, seed g)            != checksum ?  bad (Corrupt)

A late writer with a lower g is refused at the table. One that was past the table when the slot went to
another either writes bytes that do not fit the newer checksum, or a checksum of an older seed: the
reader notices both. `transfer/copies.py` does each step for many runs at once, in the same order.

The notes say which block each slot holds, as far as its owner has heard from the directory. They are what a new
directory, or the next life of a killed owner, begins with (`noted`). A note is good only while the slot has the
generation that it names, and no note is proof of any bytes: those have their checksums.

The owner holds an exclusive flock on the file for life, so that a later start can tell the leavings of a
killed process (the lock can be taken) from a living one's memory (never touched). Its own leavings it takes over
with all they hold, if they have the shape that it wants; others' are unlinked.
`multiprocessing.shared_memory` is not used: its tracker unlinks memory that it only attached to.
"""

import fcntl
import mmap
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvcache_pool.api import Corrupt, Note, Stale
from kvcache_pool.geometry import DRAINING_AT, NAME, NAME_AT, NAME_BYTES, NOTE, SHAPE_BYTES, Geometry, name_field
from protocol.ids import Incarnation, SegmentId, TenantId

SHM = Path("/dev/shm")
"""Where Linux keeps shared memory."""

CREATE_TRIES = 8
"""Each needs another process to start within the same microseconds."""

Bytes = npt.NDArray[np.uint8]


class Memory:
    """A mapped segment, the owner's or another's. Methods run in any thread and hold no lock.

    Owns the mapping. Layers must be in range, slots are checked; generations are the directory's.
    """

    def __init__(self, file: int, geometry: Geometry) -> None:
        self.geometry = geometry
        slots, layout = geometry.slots, geometry.layout
        memory = mmap.mmap(file, geometry.file_bytes)
        self.generations = np.ndarray((slots,), np.uint64, memory, geometry.generations_at)
        self.checksums = np.ndarray((slots, layout.layers), np.uint64, memory, geometry.checksums_at)
        self.notes = np.ndarray((slots,), NOTE, memory, geometry.notes_at)
        self.runs: Bytes = np.ndarray(
            (slots, layout.layers, layout.run_bytes),
            np.uint8,
            memory,
            geometry.runs_at,
            (geometry.slot_bytes, layout.run_bytes, 1),
        )
        """[slots, layers, run_bytes]. The mapping ends with the last array or frame that views it."""

    @staticmethod
    def attach(path: str, geometry: Geometry, incarnation: Incarnation) -> "Memory":
        """Map another process's segment. Raises OSError, or ValueError if the file is not what was announced."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            header = geometry.header(incarnation)
            same_size = os.fstat(file).st_size == geometry.file_bytes
            if not same_size or os.pread(file, len(header), 0) != header:
                raise ValueError(f"{path} is not the segment that was announced")
            return Memory(file, geometry)
        finally:
            os.close(file)

    def claim(self, slot: int, generation: int) -> None:
        """A writer with this generation begins. Raises Stale if the slot has been reused."""
        self._require_not_older(slot, generation)
        self.generations[slot] = generation

    def require(self, slot: int, generation: int) -> None:
        """A reader with this generation begins. Raises Stale if the slot has another one."""
        current = self._generation(slot)
        if current != generation:
            raise Stale(f"slot {slot} has generation {current}, and the grant {generation}")

    def note(self, note: Note) -> None:
        """The slot holds this block now, or (without a name) nothing to be found. Raises ValueError."""
        known = 0 <= note.slot < self.geometry.slots and 0 <= note.tenant < 1 << 64
        if not known or len(note.name) not in (0, NAME):
            raise ValueError(f"no note of a segment with {self.geometry.slots} slots: {note}")
        row = self.notes[note.slot]
        row["generation"] = 0
        if note.name:
            row["name"] = np.frombuffer(note.name, np.uint8)
            row["tenant"] = note.tenant
            row["check"] = _check(note)
            row["generation"] = note.generation

    def noted(self) -> list[Note]:
        """The notes that are good, the block that was written first of all first."""
        current = np.flatnonzero((self.notes["generation"] == self.generations) & (self.generations != 0))
        rows = self.notes[current]
        notes = (
            Note(int(slot), int(row["generation"]), row["name"].tobytes(), TenantId(int(row["tenant"])))
            for slot, row in zip(current, rows, strict=True)
        )
        good = [note for note, row in zip(notes, rows, strict=True) if int(row["check"]) == _check(note)]
        return sorted(good, key=lambda note: note.generation)

    def self_test(self) -> None:
        """Write a run and read it back; to be called before anybody has a grant. Raises Corrupt."""
        run = np.arange(self.geometry.layout.run_bytes, dtype=np.uint64).astype(np.uint8)
        copy = np.empty_like(run)
        self.put(0, 0, 0, run)
        self.get(0, 0, 0, copy)
        if not np.array_equal(run, copy):
            raise Corrupt("memory does not return what was written to it")

    def _require_not_older(self, slot: int, generation: int) -> None:
        current = self._generation(slot)
        if current > generation:
            raise Stale(f"slot {slot} has generation {current}, and the grant {generation}")

    def _generation(self, slot: int) -> int:
        if not 0 <= slot < self.geometry.slots:
            raise Stale(f"there is no slot {slot}")
        return int(self.generations[slot])

    def put(self, layer: int, slot: int, generation: int, source: Bytes) -> None:
        """Write one run and its checksum. `source` has run_bytes. Raises Stale."""
        self.claim(slot, generation)
        np.copyto(self.runs[slot, layer], source)
        self.checksums[slot, layer] = checksum(source, generation)

    def put_verified(self, layer: int, slot: int, generation: int, source: Bytes, expected: int) -> None:
        """As `put`, of a run that came with its checksum. Raises Stale, or Corrupt if it changed on the way; then
        nothing is written."""
        self._require_not_older(slot, generation)
        if checksum(source, generation) != expected:
            raise Corrupt(f"layer {layer} for slot {slot} changed on its way")
        self.claim(slot, generation)
        np.copyto(self.runs[slot, layer], source)
        self.checksums[slot, layer] = expected

    def get(self, layer: int, slot: int, generation: int, out: Bytes) -> None:
        """Read one run and verify what was read. Raises Stale or Corrupt; `out` is then garbage."""
        self.require(slot, generation)
        np.copyto(out, self.runs[slot, layer])
        if checksum(out, generation) != int(self.checksums[slot, layer]):
            raise Corrupt(f"layer {layer} of slot {slot} does not have its checksum")


class Segment:
    """The owner's end of a segment. Owns the file, its lock and its name until `close`."""

    def __init__(
        self,
        segment: SegmentId,
        incarnation: Incarnation,
        geometry: Geometry,
        folder: Path = SHM,
        *,
        keep: bool = False,
    ) -> None:
        """Take over what a killed (or, with `keep`, an earlier) owner of this name left, or create it. With `keep`
        the file outlives its owner. Raises OSError naming what is missing."""
        self.segment = segment
        self.incarnation = incarnation
        self._keep = keep
        wanted = folder / f"{_prefix()}{_plain(segment)}-{_plain(incarnation)}"
        left = _left_by(segment, folder, geometry)
        self.adopted = left is not None
        """Whether it holds what an earlier owner left."""
        if left is None:
            _require_room(folder, geometry.file_bytes)
        self._file, self.path = _create(wanted) if left is None else _renamed(left, wanted)
        try:
            os.posix_fallocate(self._file, 0, geometry.file_bytes)
            os.pwrite(self._file, geometry.header(incarnation), 0)
            os.pwrite(self._file, name_field(segment), NAME_AT)
            self._draining = os.pread(self._file, 1, DRAINING_AT) == b"\1"
            self.memory = Memory(self._file, geometry)
        except BaseException:
            self.close()
            raise

    @property
    def generation(self) -> int:
        """The highest generation that any slot has seen."""
        return int(self.memory.generations.max())

    @property
    def draining(self) -> bool:
        """Whether the directory has told last that the segment is drained. Its next life knows it too, if it takes
        the file over."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        if draining != self._draining:
            os.pwrite(self._file, bytes([draining]), DRAINING_AT)
            self._draining = draining

    def note(self, note: Note) -> None:
        """See Memory.note."""
        self.memory.note(note)

    def noted(self) -> list[Note]:
        """See Memory.noted."""
        return self.memory.noted()

    def close(self) -> None:
        """Take the file's name away, unless it is to be kept; those who have it mapped keep their memory. Twice is
        no error."""
        if self._file >= 0:
            if not self._keep:
                self.path.unlink(missing_ok=True)
            fcntl.flock(
                self._file, fcntl.LOCK_UN
            )  # the mapping has the file open too, for as long as it is viewed
            os.close(self._file)
            self._file = -1


def checksum(run: Bytes, generation: int) -> int:
    """Of one run, under the generation that it was written with."""
    return xxhash.xxh3_64_intdigest(run.data, generation)


def _check(note: Note) -> int:
    """Of all that a note says."""
    return xxhash.xxh3_64_intdigest(note.name + note.tenant.to_bytes(8, "little"), note.generation)


def reclaim(folder: Path = SHM, only: Collection[Path] | None = None) -> list[Path]:
    """Remove this user's segments whose owners are dead, or `only` those of them. Returns them."""
    removed = []
    for file, path in _ownerless(folder):
        if only is None or path in only:
            path.unlink()
            removed.append(path)
        os.close(file)
    return removed


def ownerless(folder: Path = SHM) -> list[Path]:
    """This user's segments whose owners are dead now."""
    found = []
    for file, path in _ownerless(folder):
        os.close(file)
        found.append(path)
    return found


def segment_files(folder: Path = SHM) -> list[Path]:
    """The files of this user's segments, of the living and of the dead."""
    return sorted(folder.glob(f"{_prefix()}*"))


def _ownerless(folder: Path) -> Iterator[tuple[int, Path]]:
    """This user's segments whose owners are dead, locked. The caller closes them."""
    for path in segment_files(folder):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or a link
            continue
        if _locked(file):
            yield file, path
        else:  # its owner lives
            os.close(file)


def _left_by(segment: SegmentId, folder: Path, geometry: Geometry) -> tuple[int, Path] | None:
    """What an earlier owner of this name left, if it has the wanted shape; the rest of what it left is removed.
    Others' files are not even locked: another start may be looking for its own at this moment."""
    found: tuple[int, Path] | None = None
    for path in segment_files(folder):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or a link
            continue
        if os.pread(file, NAME_BYTES, NAME_AT) != name_field(segment) or not _locked(file):
            os.close(file)
        elif found is None and _has_shape(file, geometry):
            found = file, path
        else:
            path.unlink()
            os.close(file)
    return found


def _has_shape(file: int, geometry: Geometry) -> bool:
    shape = geometry.header(Incarnation(""))[:SHAPE_BYTES]
    return os.fstat(file).st_size == geometry.file_bytes and os.pread(file, SHAPE_BYTES, 0) == shape


def _renamed(left: tuple[int, Path], wanted: Path) -> tuple[int, Path]:
    file, path = left
    return file, path.rename(wanted)


def _locked(file: int) -> bool:
    """Take the lock that an owner holds for life. False if another has it, or if the file has no name any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(file).st_nlink > 0


def _create(wanted: Path) -> tuple[int, Path]:
    """A new, empty, locked file under this name, or the name with a number."""
    for attempt in range(CREATE_TRIES):
        path = wanted.with_name(f"{wanted.name}.{attempt}") if attempt else wanted
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _locked(file):
            return file, path
        path.unlink(missing_ok=True)
        os.close(file)  # in the moment before the lock, another start took it for a dead owner's and removes it
    raise OSError(f"{wanted} was taken away {CREATE_TRIES} times before it could be locked")


def _require_room(folder: Path, wanted: int) -> None:
    """For a sentence with both numbers. Then all of it is claimed: in a sparse file, a lack of memory would
    show only at the first touch of a page, as a bus error that ends whoever touches it."""
    if _free(folder) < wanted and folder == SHM:
        reclaim(folder)  # at once; where there is room, what others left waits for their next life
    if (free := _free(folder)) < wanted:
        if folder == SHM:
            remedy = f"give it less (size_bytes) or make {folder} larger (mount -o remount,size=... {folder})"
        else:
            remedy = "give it less (disk_bytes) or make room there"
        raise OSError(f"{folder} has {free} bytes free, and the segment needs {wanted}: {remedy}")


def _free(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _prefix() -> str:
    return f"dango-{os.getuid()}-"


def _plain(name: str) -> str:
    """A name that is safe in a path."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64]
