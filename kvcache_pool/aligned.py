"""Memory that is copied to and from segments at full speed."""

import math

import numpy as np
import numpy.typing as npt

from kvcache_pool.geometry import PAGE_BYTES

Bytes = npt.NDArray[np.uint8]


def aligned(*shape: int) -> Bytes:
    """A new array of bytes that begins at a page, as the slots of a segment do; its content is unspecified.

    Where both ends of a copy lie alike within 64 bytes, it goes by whole cache lines. What `np.empty` gives begins
    16 bytes after a page: copies of some 100 KB between that and a segment took twice as long (bench/store.py).
    """
    count = math.prod(shape)
    raw = np.empty(count + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + count].reshape(shape)
