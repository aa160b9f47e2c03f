"""What moves KV between an engine's memory and segments."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache_pool.api.directory import Grant, Place

Blocks = npt.NDArray[np.uint8] | Sequence[npt.NDArray[np.uint8]]
"""Whole blocks: one array [blocks, layers, run_bytes], or arrays [layers, run_bytes] that lie anywhere."""


class Priority(Enum):
    """Which transfer goes first when several wait: what a request waits for, before what only warms the cache."""

    LOAD = "load"
    STORE = "store"
    WRITE_BACK = "write_back"


class Mover(Protocol):
    """Moves runs between an engine's memory and segments, by whatever path reaches them. Handed to services.

    `out` and `source` are one layer of an engine's pages as bytes, shape [pages, run_bytes]; the run of
    `grants[i]` belongs to row `pages[i]`. At most one copy in and one copy out on one host.
    Memory that was handed in is not touched any more once a call has returned or raised, cancelled ones too.
    """

    def know(self, places: Sequence[Place]) -> None:
        """Learn where segments are. Must be told of every segment that a later grant names."""
        ...

    async def read(
        self,
        layer: int,
        grants: Sequence[Grant],
        out: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
    ) -> int:
        """Copy runs into pages. Returns how many leading runs are good: checksum and generation verified.

        Pages from that number on hold garbage. A segment that cannot be reached makes its runs bad; nothing is
        raised but cancellation.
        """
        ...

    async def write(
        self,
        layer: int,
        grants: Sequence[Grant],
        source: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
        filled: int | None = None,
    ) -> None:
        """Copy runs out of pages, with their checksums. Raises Stale, Corrupt (changed on the way), PeerLost or
        DeadlineExceeded; and NotFinite where the pool compresses.

        `filled`: how many tokens of the last page are of this block, 1 at least; None: all. What lies behind them
        need not be kept."""
        ...

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        """As `write`, for blocks that are complete in all layers, each [layers, run_bytes]: one transfer, where a
        write for each layer would be one each. Fastest from one array [blocks, layers, run_bytes]."""
        ...

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        """As `read`, of whole blocks, into arrays as for `write_blocks`: how many leading blocks are good."""
        ...

    def in_bulk(self, grants: Sequence[Grant]) -> bool:
        """Whether `read_blocks` is the faster way to have all layers of these, if nothing is computed meanwhile:
        else one `read` after the other."""
        ...

    async def aclose(self) -> None:
        """Unmap memory and close connections."""
        ...
