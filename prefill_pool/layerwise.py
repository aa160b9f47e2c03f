"""One prompt, layer by layer: load the cached prefix, compute the rest, store what was computed, all at once.

    layer        0     1     2     3
    load      ──█████─█████─█████─█████                    one task, ahead of the compute
    copy             ─███───███───███───███                one task, beside it: what was loaded, to its copies
    compute          ─▓▓▓▓▓─▓▓▓▓▓─▓▓▓▓▓─▓▓▓▓▓              layer l waits until *its* prefix has landed
    store                  ─█████─█████─█████─█████        one task, behind the compute

A later chunk of the same prompt needs no more loading; its layers are stored in the same way. Full
blocks are committed as soon as all layers of their chunk are stored.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from engine.api import Draw, Engine, Row, Sampled
from kvcache_pool.api import Corrupt, DirectoryLink, LeaseLost, Mover, NotFinite, PoolFull, Priority, Stale
from prefill_pool.api import Prefill, PrefixLost, StoreLost
from prefill_pool.schedule import Chunk, Prompt
from protocol.errors import DangoError, DeadlineExceeded, PeerLost
from protocol.ids import BlockHash, Ids
from protocol.inbox import Inbox

log = logging.getLogger("dango.prefill")


class Store(NamedTuple):
    """One layer of one chunk, computed and waiting to be stored."""

    chunk: Chunk
    layer: int


class Job:
    """One prompt's loads, copies, passes and stores. Owned by its request's handler; `compute` is driven by the
    instance's one stepping loop."""

    def __init__(
        self, message: Prefill, prompt: Prompt, engine: Engine, mover: Mover, directory: DirectoryLink
    ) -> None:
        self.prompt = prompt
        self.first: list[Sampled] = []
        self.started = asyncio.Event()
        """Pages were given."""
        self.computed = asyncio.Event()
        """The last chunk has been computed, or computing ended early."""
        self.computed_at = 0.0
        self.load_s = 0.0
        """From the first read of the prefix to its last layer's arrival."""
        self.waited_s = 0.0
        """How long passes have waited for the prefix to arrive: time in which nothing was computed."""
        self.error: Exception | None = None
        """Why computing ended early."""
        self.idle = asyncio.Event()
        """The stepping loop is not in `compute`: nobody computes into the pages."""
        self.idle.set()
        self.stopped = False
        self._message = message
        self._engine = engine
        self._mover = mover
        self._directory = directory
        self._arrived = [asyncio.Event() for _ in range(engine.layout.layers)]
        # Bounded by itself: a prompt has so many chunks of so many layers, and these are numbers, no KV.
        self._stores: Inbox[Store | None] = Inbox()

    async def load(self) -> None:
        """Load the prefix, layer by layer. Raises PrefixLost; its bad block is then forgotten by the pool."""
        sources = self._message.sources
        pages = self.prompt.pages[: len(sources)]
        clock = asyncio.get_running_loop().time
        began = clock()
        for layer, arrived in enumerate(self._arrived):
            if sources:
                runs = self._engine.runs(layer)
                good = await self._mover.read(layer, sources, runs, pages, Priority.LOAD)
                if good < len(sources):
                    await self._discard(good, layer)
            arrived.set()
        if sources:
            self.load_s = clock() - began

    async def copy(self) -> None:
        """Write what was loaded to its copies, layer by layer, and commit them; give up if that cannot be done.

        Only what a read has verified is written. The priority is that of a store: the answer waits for it too.
        """
        copies = self._message.copies
        if not copies:
            return
        grants = [copy.target for copy in copies]
        pages = [self.prompt.pages[copy.source] for copy in copies]
        first = len(self._message.targets)
        try:
            for layer, arrived in enumerate(self._arrived):
                await arrived.wait()
                if self.stopped:
                    return  # nothing more arrives, whatever the events say
                await self._mover.write(layer, grants, self._engine.runs(layer), pages, Priority.STORE)
            names = [self._message.blocks[copy.source] for copy in copies]
            await self._directory.get().commit(self._message.lease, list(range(first, first + len(copies))), names)
        except DangoError as error:
            log.info("%d blocks were not copied: %s", len(copies), error, extra={"request": self._message.request})

    async def compute(self, chunk: Chunk) -> None:
        """Run one chunk through all layers; returns early, within one layer, after `stop`."""
        last = self._draws() if chunk.last else []
        tokens = self._message.tokens[chunk.start : chunk.end]
        run = self._engine.begin([Row(tokens, chunk.start, self.prompt.pages, last)])
        for layer, arrived in enumerate(self._arrived):
            await self._until(arrived)
            if self.stopped:
                return
            await run.layer(layer)
            self._stores.put(Store(chunk, layer))
        drawn = await run.finish()
        if chunk.last:
            self.first = drawn[0]
            self.end()

    async def _until(self, arrived: asyncio.Event) -> None:
        if not arrived.is_set():
            clock = asyncio.get_running_loop().time
            began = clock()
            await arrived.wait()
            self.waited_s += clock() - began

    def end(self, error: Exception | None = None) -> None:
        """No more chunks will be computed."""
        self.error = error
        self.computed_at = asyncio.get_running_loop().time()
        self.computed.set()

    def stop(self) -> None:
        """Compute no further layer, whatever has arrived."""
        self.stopped = True
        for arrived in self._arrived:
            arrived.set()

    async def store(self) -> None:
        """Store layers as they are computed, commit chunks as they are complete. Raises StoreLost."""
        try:
            while (store := await self._stores.get()) is not None:
                await self._store(store)
        except (Stale, Corrupt, NotFinite, PeerLost, DeadlineExceeded, LeaseLost, PoolFull) as error:
            raise StoreLost(str(error)) from error

    async def until_computed(self) -> None:
        """Wait for the last chunk; what is queued to be stored is then the rest. Raises why computing failed."""
        await self.computed.wait()
        if self.error is not None:
            raise self.error
        self._stores.put(None)

    async def _store(self, store: Store) -> None:
        step = self._engine.layout.block_tokens
        first, end = store.chunk.start // step, -(-store.chunk.end // step)
        skip = len(self._message.sources)
        grants = self._message.targets[first - skip : end - skip]
        pages = self.prompt.pages[first:end]
        runs, filled = self._engine.runs(store.layer), store.chunk.end - (end - 1) * step
        await self._mover.write(store.layer, grants, runs, pages, Priority.STORE, filled)
        if store.layer == self._engine.layout.layers - 1:
            full = self._message.blocks[first:end]  # the tail has no name and is not committed
            slots = list(range(first - skip, first - skip + len(full)))
            told: tuple[Ids, BlockHash | None] | tuple[()] = ()
            if self._message.wants_tokens:
                tokens = self._message.tokens[first * step : (first + len(full)) * step]
                told = tokens, self._message.blocks[first - 1] if first else None
            await self._directory.get().commit(self._message.lease, slots, full, *told)

    async def _discard(self, good: int, layer: int) -> None:
        text = f"block {good} of the prefix could not be loaded at layer {layer}"
        try:
            await self._directory.get().discard([self._message.sources[good]])
        except DangoError as error:
            raise PrefixLost(f"{text}, nor discarded: {error}") from error
        raise PrefixLost(text)

    def _draws(self) -> Sequence[Draw]:
        tokens, prompt_tokens = self._message.tokens, self._message.prompt_tokens
        prompt, output = tokens[:prompt_tokens], tokens[prompt_tokens:]
        return [Draw(sampling, prompt, output) for sampling in self._message.samplings]
