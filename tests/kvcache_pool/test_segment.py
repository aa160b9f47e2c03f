"""One node's memory: what readers and writers may see, and whose file it is."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.api import Corrupt, Note, Stale
from kvcache_pool.geometry import PAGE_BYTES, Geometry
from kvcache_pool.segment import SHM, Memory, Segment, checksum, ownerless, reclaim, segment_files
from protocol.blocks import BlockLayout
from protocol.ids import Incarnation, SegmentId, TenantId
from tests.kvcache_pool.builders import LAYOUT, a_segment, names, random_runs


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    segment = a_segment(folder=tmp_path)
    yield segment
    segment.close()


def attach(segment: Segment) -> Memory:
    return Memory.attach(str(segment.path), segment.memory.geometry, segment.incarnation)


def test_what_is_put_is_what_another_mapping_gets(segment: Segment) -> None:
    other, runs = attach(segment), random_runs(12)
    for number, run in enumerate(runs):
        segment.memory.put(number % 3, number // 3, 7, run)
    out = np.empty_like(runs)
    for number in range(12):
        other.get(number % 3, number // 3, 7, out[number])
    assert np.array_equal(out, runs)
    assert segment.generation == 7


def test_slots_begin_on_pages_and_do_not_overlap() -> None:
    layout = BlockLayout(3, 1, 5, 7, "float16")
    geometry = Geometry(layout, 1000)
    assert all(at % PAGE_BYTES == 0 for at in (geometry.checksums_at, geometry.runs_at, geometry.slot_bytes))
    assert geometry.checksums_at >= geometry.generations_at + 8 * 1000
    assert geometry.runs_at >= geometry.checksums_at + 8 * 3000
    assert geometry.slot_bytes >= layout.block_bytes


@pytest.mark.parametrize("size_bytes", [1 << 16, 123_457, 5 << 20])
def test_as_many_slots_as_fit(size_bytes: int) -> None:
    geometry = Geometry.within(LAYOUT, size_bytes)
    assert geometry.file_bytes <= size_bytes
    assert Geometry(LAYOUT, geometry.slots + 2).file_bytes > size_bytes
    with pytest.raises(ValueError, match="20000 bytes has no room for one block of 6144"):
        Geometry.within(LAYOUT, 20000)


def test_a_late_writer_is_refused_and_touches_nothing(segment: Segment) -> None:
    old, new = random_runs(2)
    segment.memory.put(0, 1, 5, old)
    segment.memory.put(0, 1, 6, new)
    with pytest.raises(Stale, match="generation 6, and the grant 5"):
        attach(segment).put(0, 1, 5, old)
    out = np.empty_like(new)
    segment.memory.get(0, 1, 6, out)
    assert np.array_equal(out, new)


def test_a_writer_that_is_overtaken_midway_never_makes_a_wrong_byte(segment: Segment) -> None:
    """However the steps of an old writer fall among those of a new one, a read is right or refused."""
    memory, (old, new) = segment.memory, random_runs(2)
    half = LAYOUT.run_bytes // 2
    reused = memory.runs[2, 0]

    def old_first_half() -> None:
        reused[:half] = old[:half]

    def old_second_half() -> None:
        reused[half:] = old[half:]

    def old_checksum() -> None:
        memory.checksums[2, 0] = checksum(old, 5)

    outcomes = set()
    steps = [old_first_half, old_second_half, old_checksum]
    for before in range(4):
        memory.generations[2] = 0
        memory.claim(2, 5)
        for step in steps[:before]:
            step()
        memory.put(0, 2, 6, new)
        for step in steps[before:]:
            step()
        out = np.zeros_like(new)
        try:
            memory.get(0, 2, 6, out)
            assert np.array_equal(out, new)
            outcomes.add("right")
        except Corrupt:
            outcomes.add("refused")
    assert outcomes == {"right", "refused"}


def test_a_reader_is_refused_before_the_write_and_after_reuse(segment: Segment) -> None:
    run, out = random_runs(1)[0], random_runs(1, seed=9)[0]
    with pytest.raises(Stale):
        segment.memory.get(0, 0, 5, out)
    segment.memory.put(0, 0, 5, run)
    with pytest.raises(Corrupt):
        segment.memory.get(1, 0, 5, out)  # this layer has not been written
    segment.memory.put(0, 0, 6, run)
    with pytest.raises(Stale):
        segment.memory.get(0, 0, 5, out)
    with pytest.raises(Corrupt):
        segment.memory.get(1, 0, 6, out)
    for slot in (-1, 4):
        with pytest.raises(Stale, match="no slot"):
            segment.memory.get(0, slot, 5, out)


@pytest.mark.parametrize("byte", [0, 1000, 2047])
def test_one_flipped_bit_is_found(segment: Segment, byte: int) -> None:
    run, out = random_runs(1)[0], np.empty(LAYOUT.run_bytes, np.uint8)
    segment.memory.put(2, 3, 9, run)
    segment.memory.get(2, 3, 9, out)
    segment.memory.runs[3, 2, byte] ^= 16
    with pytest.raises(Corrupt):
        segment.memory.get(2, 3, 9, out)


def test_a_file_that_is_not_what_was_announced_is_not_mapped(segment: Segment, tmp_path: Path) -> None:
    geometry = segment.memory.geometry
    wider = Geometry(BlockLayout(3, 2, 16, 16, "float16"), geometry.slots)
    for other, incarnation in (
        (wider, segment.incarnation),
        (Geometry(LAYOUT, 3), segment.incarnation),
        (geometry, Incarnation("another")),
    ):
        with pytest.raises(ValueError, match="not the segment that was announced"):
            Memory.attach(str(segment.path), other, incarnation)
    with pytest.raises(OSError, match="missing"):
        Memory.attach(str(tmp_path / "missing"), geometry, segment.incarnation)


def test_too_little_room_is_told_with_both_numbers(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    slots = room.f_bavail * room.f_frsize // LAYOUT.block_bytes * 2 + 1
    needed = Geometry(LAYOUT, slots).file_bytes
    with pytest.raises(OSError, match=rf"has \d+ bytes free, and the segment needs {needed}"):
        a_segment(slots, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    segment = a_segment(folder=tmp_path)
    assert segment.path.stat().st_mode & 0o777 == 0o600
    segment.close()
    segment.close()
    assert list(tmp_path.iterdir()) == []


def test_the_memory_proves_itself(segment: Segment) -> None:
    segment.memory.self_test()
    segment.memory.put(0, 0, 1, random_runs(1)[0])
    with pytest.raises(Stale):
        segment.memory.self_test()


OWNER = """
import sys, time
from pathlib import Path
from kvcache_pool.segment import Segment
from tests.kvcache_pool.builders import a_segment, random_runs
segment = a_segment(segment="owner", folder=Path(sys.argv[1]))
segment.memory.put(0, 0, 1, random_runs(1)[0])
sys.stdout.write(str(segment.path) + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""

ATTACHER = """
import sys
import numpy as np
from pathlib import Path
from kvcache_pool.segment import Geometry, Memory
from protocol.ids import Incarnation
from tests.kvcache_pool.builders import LAYOUT, random_runs
memory = Memory.attach(sys.argv[1], Geometry(LAYOUT, 4), Incarnation(sys.argv[2]))
out = np.zeros(LAYOUT.run_bytes, np.uint8)
memory.get(0, 0, 1, out)
assert np.array_equal(out, random_runs(1)[0])
memory.put(1, 0, 1, out)
"""


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_killed_owners_memory_is_reclaimed_and_a_living_ones_never(tmp_path: Path) -> None:  # B52
    owner = start(OWNER, str(tmp_path))
    try:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert reclaim(tmp_path) == []
        assert left.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        assert left.exists()
        segment = a_segment(segment="next", folder=tmp_path)
        assert reclaim(tmp_path) == [left]
        assert list(tmp_path.iterdir()) == [segment.path]
        segment.close()
    finally:
        owner.kill()
        owner.communicate()


def test_who_attaches_and_ends_leaves_the_memory_to_its_owner(segment: Segment) -> None:  # B52
    run, out = random_runs(1)[0], np.empty(LAYOUT.run_bytes, np.uint8)
    segment.memory.put(0, 0, 1, run)
    attacher = start(ATTACHER, str(segment.path), segment.incarnation)
    _, errors = attacher.communicate(timeout=30)
    assert (attacher.returncode, errors) == (0, "")
    assert segment.path.exists()
    segment.memory.get(1, 0, 1, out)
    assert np.array_equal(out, run)


def test_another_users_or_strange_files_are_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / f"dango-{os.getuid() + 1}-kv-0-x"
    stranger.write_bytes(b"")
    (tmp_path / f"dango-{os.getuid()}-link").symlink_to(stranger)
    assert reclaim(tmp_path) == []
    assert stranger.exists()


def test_a_name_that_is_taken_is_an_error(segment: Segment, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        Segment(SegmentId(segment.segment), segment.incarnation, segment.memory.geometry, tmp_path)


NOTED = [Note(0, 7, names(1)[0]), Note(2, 9, names(2)[0], TenantId((1 << 64) - 1))]


def a_killed_owner(folder: Path, incarnation: str = "first", *, keep: bool = False, slots: int = 4) -> Path:
    """Writes two blocks, notes them down, and is killed. Returns what it leaves."""
    segment = Segment(SegmentId("kv"), Incarnation(incarnation), Geometry(LAYOUT, slots), folder, keep=keep)
    for note in NOTED:
        for layer, run in enumerate(random_runs(LAYOUT.layers, note.slot)):
            segment.memory.put(layer, note.slot, note.generation, run)
        segment.note(note)
    os.close(segment._file)  # what the kernel does for a dead process: the lock goes, the name stays
    segment._file = -1
    return segment.path


def next_life(folder: Path, slots: int = 4, *, keep: bool = False) -> Segment:
    return Segment(SegmentId("kv"), Incarnation("second"), Geometry(LAYOUT, slots), folder, keep=keep)


def test_the_next_life_of_a_killed_owner_has_all_that_it_noted(tmp_path: Path) -> None:
    a_killed_owner(tmp_path)
    segment = next_life(tmp_path)
    assert segment.adopted
    assert segment.noted() == NOTED
    assert segment.generation == 9
    assert list(tmp_path.iterdir()) == [segment.path]
    out = np.empty(LAYOUT.run_bytes, np.uint8)
    memory = Memory.attach(str(segment.path), segment.memory.geometry, Incarnation("second"))
    for note in NOTED:
        for layer, run in enumerate(random_runs(LAYOUT.layers, note.slot)):
            memory.get(layer, note.slot, note.generation, out)
            assert np.array_equal(out, run)
    segment.close()
    assert list(tmp_path.iterdir()) == []


def test_a_late_writer_of_an_earlier_life_makes_no_wrong_byte(tmp_path: Path) -> None:
    late = Memory.attach(str(a_killed_owner(tmp_path)), Geometry(LAYOUT, 4), Incarnation("first"))
    segment = next_life(tmp_path)
    late.put(0, 0, 8, random_runs(1, 99)[0])  # its grant for slot 0 is newer than the note
    assert segment.noted() == NOTED[1:]
    with pytest.raises(Stale):
        segment.memory.get(0, 0, 7, np.empty(LAYOUT.run_bytes, np.uint8))
    segment.close()


def test_what_has_another_shape_is_not_taken_over_but_removed(tmp_path: Path) -> None:
    left = a_killed_owner(tmp_path)
    segment = next_life(tmp_path, slots=5)
    assert not segment.adopted
    assert segment.noted() == []
    assert not left.exists()
    segment.close()


def test_what_is_compressed_otherwise_is_not_taken_over_though_it_has_as_many_bytes(tmp_path: Path) -> None:
    int8, fp8 = (Geometry(replace(LAYOUT, compression=form), 4) for form in ("int8", "fp8"))
    assert int8.file_bytes == fp8.file_bytes
    lives = []
    for number, geometry in enumerate((int8, int8, fp8)):
        lives.append(Segment(SegmentId("kv"), Incarnation(f"life{number}"), geometry, tmp_path, keep=True))
        lives[-1].close()
    assert [life.adopted for life in lives] == [False, True, False]
    assert [path.name for path in segment_files(tmp_path)] == [lives[-1].path.name]


def test_a_living_owners_memory_is_not_taken_over(tmp_path: Path) -> None:
    living = Segment(SegmentId("kv"), Incarnation("first"), Geometry(LAYOUT, 4), tmp_path)
    other = next_life(tmp_path)
    assert not other.adopted
    assert other.path != living.path
    other.close()
    living.close()


def test_what_others_left_waits_for_their_next_life(tmp_path: Path) -> None:
    left = a_killed_owner(tmp_path)
    other = a_segment(segment="kv-1", folder=tmp_path)  # whose name begins like the dead one's
    assert left.exists()
    assert not other.adopted
    other.close()


def test_what_is_kept_outlives_a_good_end(tmp_path: Path) -> None:
    segment = next_life(tmp_path, keep=True)
    segment.memory.put(0, 1, 3, random_runs(1)[0])
    segment.note(Note(1, 3, names(5)[0]))
    segment.close()
    again = Segment(SegmentId("kv"), Incarnation("third"), Geometry(LAYOUT, 4), tmp_path, keep=True)
    assert again.noted() == [Note(1, 3, names(5)[0])]
    again.close()


@pytest.mark.parametrize("field", ["name", "generation", "check", "tenant"])
def test_a_note_that_was_half_written_is_none(segment: Segment, field: str) -> None:
    segment.memory.put(0, 1, 3, random_runs(1)[0])
    segment.note(Note(1, 3, names(5)[0]))
    torn = segment.memory.notes[1:2][field].view(np.uint8)
    torn.flat[0] ^= 1
    assert segment.noted() == []


def test_a_note_goes_with_its_block(segment: Segment) -> None:
    segment.memory.put(0, 1, 3, random_runs(1)[0])
    segment.note(Note(1, 3, names(5)[0]))
    segment.note(Note(1, 3, b""))
    assert segment.noted() == []


@pytest.mark.parametrize(
    "note",
    [
        Note(4, 1, names(1)[0]),
        Note(-1, 1, names(1)[0]),
        Note(0, 1, b"short"),
        Note(0, 1, names(1)[0], TenantId(-1)),
        Note(0, 1, names(1)[0], TenantId(1 << 64)),
    ],
)
def test_a_note_of_no_slot_or_no_name_is_refused(segment: Segment, note: Note) -> None:
    with pytest.raises(ValueError, match="no note of a segment with 4 slots"):
        segment.note(note)


def test_who_died_lately_is_left_to_its_next_life(tmp_path: Path) -> None:
    owner = start(OWNER, str(tmp_path))
    try:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        before = ownerless(tmp_path)
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        assert (before, reclaim(tmp_path, before), ownerless(tmp_path)) == ([], [], [left])
        assert reclaim(tmp_path, [left]) == [left]
        assert not left.exists()
    finally:
        owner.kill()
        owner.communicate()


def test_a_folder_that_is_too_small_is_told_with_the_setting_that_mends_it(tmp_path: Path) -> None:
    for folder, setting in ((tmp_path, "disk_bytes"), (SHM, "size_bytes")):
        with pytest.raises(OSError, match=f"{folder} has .* bytes free, and .* give it less .{setting}"):
            Segment(SegmentId("kv-0"), Incarnation("huge"), Geometry(LAYOUT, 1 << 40), folder)
