"""What the check of a segment's file finds, and what it leaves alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache_pool.api import Note
from kvcache_pool.check import found_files, open_segment, verify
from kvcache_pool.geometry import PAGE_BYTES, Geometry
from kvcache_pool.segment import Memory, Segment
from tests.kvcache_pool.builders import LAYOUT, a_segment, names, random_runs

NOTES = [Note(slot, 10 + slot, names(slot + 1)[0]) for slot in range(3)]


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    """Three blocks in four slots."""
    segment = a_segment(folder=tmp_path)
    for note in NOTES:
        for layer, run in enumerate(random_runs(LAYOUT.layers, note.slot)):
            segment.memory.put(layer, note.slot, note.generation, run)
        segment.note(note)
    yield segment
    segment.close()


def test_a_sound_file_has_no_faults(segment: Segment, tmp_path: Path) -> None:
    assert found_files([tmp_path]) == [segment.path]
    opened = open_segment(segment.path)
    assert (opened.segment, opened.incarnation) == (segment.segment, segment.incarnation)
    assert opened.memory.noted() == NOTES
    assert list(verify(opened, NOTES)) == []


@pytest.mark.parametrize("layer", range(LAYOUT.layers))
def test_one_wrong_bit_in_any_layer_is_found(segment: Segment, layer: int) -> None:
    segment.memory.runs[1, layer, 77] ^= 1
    faults = list(verify(open_segment(segment.path), NOTES))
    assert [(fault.slot, fault.name) for fault in faults] == [(1, NOTES[1].name)]
    assert f"layer {layer} of slot 1 does not have its checksum" in faults[0].reason


def test_a_block_that_is_elsewhere_in_the_index_is_found(segment: Segment) -> None:
    wrong = [Note(0, 99, names(1)[0]), Note(3, 13, names(9)[0]), Note(7, 1, names(9)[0])]
    reasons = [fault.reason for fault in verify(open_segment(segment.path), wrong)]
    assert reasons == [
        "slot 0 has generation 10, and the grant 99",
        "slot 3 has generation 0, and the grant 13",
        "there is no slot 7",
    ]


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_file_says_that_its_blocks_are_compressed(tmp_path: Path, form: str) -> None:
    layout = replace(LAYOUT, compression=form)
    segment = a_segment(2, folder=tmp_path, layout=layout)
    try:
        assert open_segment(segment.path).memory.geometry.layout == layout
        with pytest.raises(ValueError, match="is not the segment that was announced"):
            Memory.attach(str(segment.path), Geometry(LAYOUT, 2), segment.incarnation)
    finally:
        segment.close()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"short", "shorter than a segment's header"), (bytes(PAGE_BYTES), "no segment of format")],
)
def test_what_is_no_segment_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "strange"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        open_segment(path)


def test_a_cut_file_is_refused(segment: Segment, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(segment.path.read_bytes()[:-PAGE_BYTES])
    with pytest.raises(ValueError, match=r"it has \d+ bytes, and its header says \d+"):
        open_segment(path)
