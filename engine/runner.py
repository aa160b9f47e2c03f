"""The engine in torch: a model, its paged KV memory, and the one thread that may touch them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.api import Draw, Row, Sampled
from engine.checkpoint import Checkpoint
from engine.ending import end_of
from engine.model import Batch, Model
from engine.paging import pages_for
from engine.sampling import sample
from engine.weights import DTYPES, load_weights
from protocol.blocks import BlockLayout

T = TypeVar("T")


class EngineBroken(RuntimeError):
    """The model loaded but does not compute: its self-test gave no finite numbers."""


def load_engine(
    checkpoint: Checkpoint, *, dtype: str, pages: int, block_tokens: int, threads: int
) -> "TorchEngine":
    """Load the weights and make an engine, not yet self-tested. Blocks for seconds.

    `dtype` is one of DTYPES, for weights and KV alike; `threads` is how many CPU threads a pass may use.
    Raises ValueError for settings out of range, OSError.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {sorted(DTYPES)}, not {dtype!r}")
    if min(pages, block_tokens, threads) < 1:
        raise ValueError("pages, block_tokens and threads must be positive")
    arch = checkpoint.architecture
    layout = BlockLayout(arch.layers, arch.kv_heads, arch.head_dim, block_tokens, dtype)
    return TorchEngine(Model(arch, load_weights(checkpoint, DTYPES[dtype])), layout, pages=pages, threads=threads)


class TorchEngine:
    """Implements engine.api.Engine. Owns the KV memory and a thread in which all torch work runs.

    cache [layers, pages, 2, block_tokens, kv_heads, head_dim]: a (layer, page) is one run of bytes. Its memory is
    taken from the system only as pages are first written.
    """

    def __init__(self, model: Model, layout: BlockLayout, *, pages: int, threads: int) -> None:
        self.layout = layout
        self.pages = pages
        self.context_tokens = model.architecture.context_tokens
        self.model = model
        self.cache = _allocate(layout, pages)
        self._bytes: npt.NDArray[np.uint8] = self.cache.view(torch.uint8).view(layout.layers, pages, -1).numpy()
        assert self._bytes.shape == (layout.layers, pages, layout.run_bytes)
        # The count of torch's threads belongs to the thread that calls torch, so it is set in there.
        self._thread = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(threads,))

    def begin(self, rows: Sequence[Row]) -> "TorchPass":
        """Start a pass. Raises ValueError for a row that cannot be computed; nothing is touched then."""
        for row in rows:
            self._require(row)
        return TorchPass(self, rows)

    async def step(self, rows: Sequence[Row]) -> list[list[Sampled]]:
        """A whole pass in one visit to the thread. Raises as `begin` and `Pass.finish` do."""
        return await self.in_thread(self.begin(rows).run)

    async def run(self, rows: Sequence[Row], steps: int, enough: asyncio.Event) -> list[list[Sampled]]:
        """Several decode steps in one visit to the thread. Raises as `step` does."""
        for row in rows:
            if len(row.tokens) != 1 or len(row.draws) != 1:
                raise ValueError("every row of a run has one token and one draw")
            self._require(row, steps - 1)
        return await self.in_thread(lambda: self._run(rows, steps, enough))

    def runs(self, layer: int) -> npt.NDArray[np.uint8]:
        """The KV of one layer, [pages, run_bytes], a view."""
        return self._bytes[layer]

    def block(self, page: int) -> npt.NDArray[np.uint8]:
        """The KV of one page, [layers, run_bytes], a view."""
        return self._bytes[:, page]

    def close(self) -> None:
        """Stop the thread, after what it is doing. Idempotent."""
        self._thread.shutdown(wait=True)

    async def self_test(self) -> None:
        """Run two tokens in the first page, before it is anyone's: call it before the first request.

        Raises EngineBroken.
        """
        row = Row(tokens=[0, 1][: self.layout.block_tokens], start=0, pages=[0])
        logits = await self.in_thread(TorchPass(self, [row]).logits_of_all)
        if not np.isfinite(logits).all():
            raise EngineBroken("the self-test gave logits that are not finite")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread. A caller that is cancelled leaves it to end there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _run(self, rows: Sequence[Row], steps: int, enough: asyncio.Event) -> list[list[Sampled]]:
        said: list[list[Sampled]] = [[] for _ in rows]
        for _ in range(steps):
            drawn = [one for (one,) in TorchPass(self, rows).run()]
            for of_row, one in zip(said, drawn, strict=True):
                of_row.append(one)
            rows = [_after(row, one.token) for row, one in zip(rows, drawn, strict=True)]
            if enough.is_set() or any(end_of(row.draws[0].sampling, row.draws[0].output) for row in rows):
                break
        return said

    def _require(self, row: Row, more: int = 0) -> None:
        """`more`: tokens that the row will yet draw and compute."""
        vocab, end = self.model.architecture.vocab, row.start + len(row.tokens) + more
        if not row.tokens or row.start < 0:
            raise ValueError("a row needs a token, and a start of at least 0")
        if min(row.tokens) < 0 or max(row.tokens) >= vocab:
            raise ValueError(f"a token is outside the vocabulary of {vocab}")
        if end > self.context_tokens:
            raise ValueError(f"a row ends at token {end}; the model's context has {self.context_tokens}")
        if len(row.pages) < pages_for(end, self.layout.block_tokens):
            raise ValueError(f"{len(row.pages)} pages of {self.layout.block_tokens} do not hold {end} tokens")
        if min(row.pages) < 0 or max(row.pages) >= self.pages:
            raise ValueError(f"a page is outside the engine's {self.pages}")
        for draw in row.draws:
            said = (*draw.sampling.stop_tokens, *draw.output[-1:])  # the others were the last once
            if any(not 0 <= token < vocab for token in said):
                raise ValueError(f"a stop or output token is outside the vocabulary of {vocab}")


def _after(row: Row, token: int) -> Row:
    """The next decode step of a row that has just drawn `token`."""
    (draw,) = row.draws
    return Row([token], row.start + 1, row.pages, [Draw(draw.sampling, draw.prompt, [*draw.output, token])])


def _allocate(layout: BlockLayout, pages: int) -> Tensor:
    """The KV memory of an engine. Raises ValueError if the system does not give so much."""
    shape = (layout.layers, pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    try:
        return torch.empty(shape, dtype=DTYPES[layout.kv_type])
    except RuntimeError as error:
        raise ValueError(
            f"there is no memory for {pages} KV pages of {layout.block_bytes} bytes, "
            f"{pages * layout.block_bytes} bytes in all; lower context_tokens or pages"
        ) from error


class TorchPass:
    """Implements engine.api.Pass. Mutates the engine's cache, in the engine's thread only."""

    def __init__(self, engine: TorchEngine, rows: Sequence[Row]) -> None:
        self._engine = engine
        self._rows = rows
        self._next = 0
        self._batch: Batch
        self._x: Tensor

    async def layer(self, layer: int) -> None:
        """Compute one layer. Raises ValueError out of turn."""
        if layer != self._next or layer >= self._engine.layout.layers:
            raise ValueError(f"layer {layer} is not next; {self._next} is")
        self._next += 1
        await self._engine.in_thread(lambda: self._layer(layer))

    async def finish(self) -> list[list[Sampled]]:
        """Sample. Raises ValueError before the last layer, FloatingPointError if logits are not finite."""
        if self._next != self._engine.layout.layers:
            raise ValueError(f"layer {self._next} has not been computed")
        return await self._engine.in_thread(self._finish)

    def run(self) -> list[list[Sampled]]:
        """The whole pass, in the calling thread."""
        for layer in range(self._engine.layout.layers):
            self._layer(layer)
        return self._finish()

    def logits_of_all(self) -> npt.NDArray[np.float32]:
        """The whole pass without sampling, in the calling thread: logits of every token, [tokens, vocab]."""
        for layer in range(self._engine.layout.layers):
            self._layer(layer)
        with torch.inference_mode():
            logits: npt.NDArray[np.float32] = self._engine.model.head(self._x).numpy()
        return logits

    def _layer(self, layer: int) -> None:
        if not self._rows:
            return
        model = self._engine.model
        with torch.inference_mode():
            if layer == 0:
                self._batch = model.batch(self._rows, self._engine.layout.block_tokens)
                self._x = model.embed(self._batch)
            self._x = model.layer(layer, self._x, self._engine.cache[layer], self._batch)

    def _finish(self) -> list[list[Sampled]]:
        sampled: list[list[Sampled]] = [[] for _ in self._rows]
        drawing = [index for index, row in enumerate(self._rows) if row.draws]
        if drawing:
            with torch.inference_mode():
                last = torch.tensor([self._batch.spans[index].end - 1 for index in drawing])
                logits = self._engine.model.head(self._x[last]).numpy()
            for index, scores in zip(drawing, logits, strict=True):
                sampled[index] = [sample(scores, draw) for draw in self._rows[index].draws]
        return sampled
