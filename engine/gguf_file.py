"""The header of a GGUF file: its fields and where its tensors lie.

Read with `struct` instead of the gguf library's reader: that one makes several numpy arrays for each of the
hundred thousand strings of a vocabulary, two seconds for each process of the service; this takes 0.1 s.
Quantisation types and their arithmetic stay the library's.

    "GGUF" | version | n tensors | m fields | m x (key, type, value) | n x (name, shape, type, offset) | pad | data
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from engine.architecture import StoredTensor, UnsupportedModel

VERSIONS = (2, 3)
_SCALARS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")
"""The struct format of each value type, by its number; 8 and 9 are string and array."""
_STRING, _ARRAY = 8, 9
_ARRAY_ITEMS_MAX = 1 << 24
"""No vocabulary is larger; a longer array is a damaged length."""
_DIMENSIONS_MAX = 4


@dataclass(frozen=True)
class GgufFile:
    """The header of one file; values are int, float, bool, str, or lists of one of them."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header. Raises UnsupportedModel if it is damaged, of another version, or in several parts."""
    damaged = f"{path.name} is a damaged or cut GGUF file"
    if path.stat().st_size == 0:
        raise UnsupportedModel(f"{damaged}: it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _read(path, data)
        except IndexError as error:
            raise UnsupportedModel(f"{damaged}: {error}") from error
        except (struct.error, UnicodeDecodeError) as error:
            raise UnsupportedModel(damaged) from error


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    if data[:4] != b"GGUF":
        raise UnsupportedModel(f"{path.name} is not a GGUF file")
    if len(data) < 24:
        raise IndexError("it ends within its first fields")
    version, tensor_count, field_count = struct.unpack_from("<IQQ", data, 4)
    if version not in VERSIONS:
        raise UnsupportedModel(f"{path.name}: GGUF version {version}; supported: {VERSIONS}")
    cursor = _Cursor(data, 24)
    fields = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(field_count)}
    if fields.get("split.count", 0) > 1:
        raise UnsupportedModel(f"{path.name} is one of {fields['split.count']} parts; merge them first")
    found = [cursor.tensor() for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise IndexError(f"alignment {alignment}")
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, kind, base + offset) for name, shape, kind, offset in found}
    for name, tensor in tensors.items():
        if tensor.offset + tensor.bytes > len(data):
            raise UnsupportedModel(f"{path.name} is cut short: {name} ends beyond the file")
    return GgufFile(path, fields, tensors)


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedModel(f"{path.name}: {name} has the unknown quantisation type {kind}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[type_]
    return StoredTensor(path, name, shape, type_.name, offset, math.prod(shape) // block_size * block_bytes)


class _Cursor:
    """A reading position in the header. Mutates: everything that reads moves it."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise IndexError("a string ends beyond the file")
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_form(kind))
        item, count = self.scalar("<I"), self.scalar("<Q")
        if count > _ARRAY_ITEMS_MAX:
            raise IndexError(f"an array of {count} items")
        if item == _STRING:
            return [self.string() for _ in range(count)]
        form = f"<{count}{_form(item)[1]}"
        values = list(struct.unpack_from(form, self.data, self.at))
        self.at += struct.calcsize(form)
        return values

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape outermost first, type number, offset from the start of the data."""
        name, dimensions = self.string(), self.scalar("<I")
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise IndexError(f"{name} has {dimensions} dimensions")
        shape = tuple(self.scalar("<Q") for _ in range(dimensions))[::-1]
        return name, shape, self.scalar("<I"), self.scalar("<Q")


def _form(kind: int) -> str:
    if kind >= len(_SCALARS):
        raise IndexError(f"a value of the unknown type {kind}")
    form = _SCALARS[kind]
    if form is None:
        raise IndexError("an array of arrays")
    return form
