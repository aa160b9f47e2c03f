"""Small honest stand-ins: an engine whose text depends on every byte of KV, and a pool in a dict.

    kv(layer, p) = H(layer, kv(layer, p - 1), token p)        8 bytes a token, in the pages
    next token   = H(kv of all layers at the last position)

So a page that was loaded wrongly, late, or not at all changes the text, as with a real model, and the
text can be foretold from the tokens alone.
"""

import asyncio
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.api import Draw, Row, Sampled
from engine.ending import end_of
from kvcache_pool.api import Blocks, Grant, Place, Priority
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest
from protocol.ids import SegmentId

LAYOUT = BlockLayout(layers=3, kv_heads=1, head_dim=1, block_tokens=4, kv_type="float32")
MANIFEST = Manifest("fake", "model-digest", "tokenizer-digest", 256, LAYOUT)
VOCAB = 1000


def step_kv(layer: int, before: bytes, token: int) -> bytes:
    """The KV of one token, 8 bytes, from that of the token before it (empty at the start)."""
    return hashlib.sha256(b"%d|%d|" % (layer, token) + before).digest()[:8]


def draw(last_kv: Sequence[bytes]) -> int:
    """The next token, from all layers' KV at the last position."""
    return int.from_bytes(hashlib.sha256(b"".join(last_kv)).digest()[:4], "little") % VOCAB


def foretell(prompt: Sequence[int], count: int, layers: int = LAYOUT.layers) -> list[int]:
    """The first `count` tokens of the answer to `prompt`."""
    state = [b""] * layers
    for token in prompt:
        state = [step_kv(layer, kv, token) for layer, kv in enumerate(state)]
    answer = []
    for _ in range(count):
        answer.append(draw(state))
        state = [step_kv(layer, kv, answer[-1]) for layer, kv in enumerate(state)]
    return answer


class FakePass:
    def __init__(self, engine: "FakeEngine", rows: Sequence[Row]) -> None:
        self._engine = engine
        self._rows = rows

    async def layer(self, layer: int) -> None:
        await asyncio.sleep(self._engine.layer_s)
        self._engine.layers_run += 1
        for row in self._rows:
            self._engine.compute(layer, row)

    async def finish(self) -> list[list[Sampled]]:
        self._engine.passes += 1
        return [[Sampled(self._engine.drawn(row)) for _ in row.draws] for row in self._rows]


class FakeEngine:
    """An engine.api.Engine. `layer_s` is how long a layer takes."""

    def __init__(self, pages: int = 64, layer_s: float = 0.0) -> None:
        self.layout = LAYOUT
        self.pages = pages
        self.context_tokens = MANIFEST.context_tokens
        self.layer_s = layer_s
        self.layers_run = 0
        self.passes = 0
        self.tokens_computed = 0
        self._kv = np.full((LAYOUT.layers, pages, LAYOUT.run_bytes), 0xEE, np.uint8)

    def begin(self, rows: Sequence[Row]) -> FakePass:
        return FakePass(self, rows)

    async def step(self, rows: Sequence[Row]) -> list[list[Sampled]]:
        run = self.begin(rows)
        for layer in range(LAYOUT.layers):
            await run.layer(layer)
        return await run.finish()

    async def run(self, rows: Sequence[Row], steps: int, enough: asyncio.Event) -> list[list[Sampled]]:
        said: list[list[Sampled]] = [[] for _ in rows]
        for _ in range(steps):
            drawn = [one for (one,) in await self.step(rows)]
            for index, (row, one) in enumerate(zip(rows, drawn, strict=True)):
                said[index].append(one)
                (draw,) = row.draws
                after = Draw(draw.sampling, draw.prompt, [*draw.output, one.token])
                rows = [*rows[:index], Row([one.token], row.start + 1, row.pages, [after]), *rows[index + 1 :]]
            if enough.is_set() or any(end_of(row.draws[0].sampling, row.draws[0].output) for row in rows):
                break
        return said

    def runs(self, layer: int) -> npt.NDArray[np.uint8]:
        return self._kv[layer]

    def block(self, page: int) -> npt.NDArray[np.uint8]:
        return self._kv[:, page]

    def close(self) -> None:
        pass

    def compute(self, layer: int, row: Row) -> None:
        for position, token in enumerate(row.tokens, row.start):
            before = self._get(layer, row, position - 1) if position else b""
            self._put(layer, row, position, step_kv(layer, before, token))
        self.tokens_computed += len(row.tokens) if layer == 0 else 0

    def drawn(self, row: Row) -> int:
        last = row.start + len(row.tokens) - 1
        return draw([self._get(layer, row, last) for layer in range(LAYOUT.layers)])

    def _cells(self, row: Row, position: int) -> tuple[int, slice, slice]:
        step = LAYOUT.block_tokens
        at = 4 * (position % step)
        return row.pages[position // step], slice(at, at + 4), slice(4 * step + at, 4 * step + at + 4)

    def _get(self, layer: int, row: Row, position: int) -> bytes:
        page, keys, values = self._cells(row, position)
        run = self._kv[layer, page]
        return run[keys].tobytes() + run[values].tobytes()

    def _put(self, layer: int, row: Row, position: int, kv: bytes) -> None:
        page, keys, values = self._cells(row, position)
        self._kv[layer, page, keys] = np.frombuffer(kv[:4], np.uint8)
        self._kv[layer, page, values] = np.frombuffer(kv[4:], np.uint8)


class MemoryMover:
    """A kvcache_pool.api.Mover over a dict; a slot that was never written is a bad block."""

    def __init__(self, *, bulk: bool = True) -> None:
        self.bulk = bulk
        """What `in_bulk` says."""
        self.runs: dict[tuple[SegmentId, int, int, int], bytes] = {}
        self.refused: dict[tuple[SegmentId, int], Exception] = {}
        """Slots that cannot be written, and what a writer hears."""
        self.writes = 0

    def know(self, places: Sequence[Place]) -> None:
        pass

    async def read(
        self,
        layer: int,
        grants: Sequence[Grant],
        out: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
    ) -> int:
        await asyncio.sleep(0)
        for good, (grant, page) in enumerate(zip(grants, pages, strict=True)):
            run = self.runs.get((grant.segment, grant.slot, grant.generation, layer))
            if run is None:
                return good
            out[page] = np.frombuffer(run, np.uint8)
        return len(grants)

    async def write(
        self,
        layer: int,
        grants: Sequence[Grant],
        source: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
        filled: int | None = None,
    ) -> None:
        await asyncio.sleep(0)
        for grant, page in zip(grants, pages, strict=True):
            if (grant.segment, grant.slot) in self.refused:
                raise self.refused[grant.segment, grant.slot]
            self.runs[grant.segment, grant.slot, grant.generation, layer] = source[page].tobytes()
            self.writes += 1

    def in_bulk(self, grants: Sequence[Grant]) -> bool:
        return self.bulk

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        for layer, rows in enumerate(zip(*blocks, strict=True)):
            await self.write(layer, grants, np.stack(rows), range(len(grants)), priority)

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        good = len(grants)
        for layer, rows in enumerate(zip(*blocks, strict=True)):
            out = np.stack(rows)
            good = min(good, await self.read(layer, grants, out, range(len(out)), priority))
            for row, run in zip(rows, out, strict=True):
                row[:] = run
        return good

    async def aclose(self) -> None:
        pass
