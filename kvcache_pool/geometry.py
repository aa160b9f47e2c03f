"""The shape of a segment's file: where what lies in it. See segment.py for the picture."""

import os
import struct
from dataclasses import dataclass

import numpy as np

from protocol.blocks import BlockLayout
from protocol.ids import BLOCK_HASH_BYTES, Incarnation, SegmentId

MAGIC = b"DANGOSEG"
FORMAT = 3
"""Raised when the file's layout changes; a process of another version then refuses to attach."""

PAGE_BYTES = 4096
SHAPE_BYTES = struct.calcsize("<8sI4I16sQ")
HEADER = struct.Struct("<8sI4I16sQ64s")
"""Magic, format, layers, kv_heads, head_dim, block_tokens, kv_form, slots, incarnation."""
NAME_AT, NAME_BYTES = HEADER.size, 64
"""Where the segment's name lies in the header page."""
DRAINING_AT = NAME_AT + NAME_BYTES
"""A byte of that page: 1 while the segment is drained."""

NAME = BLOCK_HASH_BYTES
"""Bytes of a block's name."""
NOTE = np.dtype([("generation", "<u8"), ("check", "<u8"), ("tenant", "<u8"), ("name", "u1", (NAME,))])
"""Which block a slot holds: the generation it was written with, its tenant, and its name. `check` is a checksum of
all: a note may be half written when the power fails."""


@dataclass(frozen=True)
class Geometry:
    """Where what lies in a segment's file."""

    layout: BlockLayout
    slots: int

    @property
    def generations_at(self) -> int:
        return PAGE_BYTES

    @property
    def checksums_at(self) -> int:
        return self.generations_at + _aligned(8 * self.slots)

    @property
    def notes_at(self) -> int:
        return self.checksums_at + _aligned(8 * self.slots * self.layout.layers)

    @property
    def runs_at(self) -> int:
        return self.notes_at + _aligned(NOTE.itemsize * self.slots)

    @property
    def slot_bytes(self) -> int:
        """From the start of one slot to the next."""
        return _aligned(self.layout.block_bytes)

    @property
    def file_bytes(self) -> int:
        return self.runs_at + self.slots * self.slot_bytes

    @staticmethod
    def within(layout: BlockLayout, size_bytes: int) -> "Geometry":
        """As many slots as fit `size_bytes`, tables included. Raises ValueError if that is none."""
        a_slot = _aligned(layout.block_bytes) + 8 * (1 + layout.layers) + NOTE.itemsize
        slots = (size_bytes - 4 * PAGE_BYTES) // a_slot
        if slots < 1:
            raise ValueError(f"a segment of {size_bytes} bytes has no room for one block of {layout.block_bytes}")
        return Geometry(layout, slots)

    def header(self, incarnation: Incarnation) -> bytes:
        """The first bytes of the file."""
        layout = self.layout
        shape = (layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens)
        names = (layout.kv_form.encode(), self.slots, incarnation.encode())
        return HEADER.pack(MAGIC, FORMAT, *shape, *names)

    @staticmethod
    def of(file: int) -> tuple[SegmentId, Incarnation, "Geometry"]:
        """Whose file this is, in which life, and its shape. Raises ValueError for one that is no segment."""
        page = os.pread(file, PAGE_BYTES, 0)
        if len(page) < PAGE_BYTES:
            raise ValueError("it is shorter than a segment's header")
        magic, version, *shape, kv_form, slots, incarnation = HEADER.unpack_from(page)
        if (magic, version) != (MAGIC, FORMAT):
            raise ValueError(f"it is no segment of format {FORMAT}")
        geometry = Geometry(BlockLayout.of_form(_text(kv_form), *shape), slots)
        if os.fstat(file).st_size != geometry.file_bytes:
            raise ValueError(f"it has {os.fstat(file).st_size} bytes, and its header says {geometry.file_bytes}")
        name = page[NAME_AT : NAME_AT + NAME_BYTES]
        return SegmentId(_text(name)), Incarnation(_text(incarnation)), geometry


def name_field(segment: SegmentId) -> bytes:
    """The segment's name as it lies at NAME_AT."""
    return segment.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _aligned(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES
