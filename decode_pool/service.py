"""A decode instance: loads KV that others computed, steps its whole batch, streams tokens."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from decode_pool.api import Decode, DecodeBusy, Ended, Joined, Token, TooLong
from decode_pool.config import DecodeConfig
from decode_pool.schedule import Key, Plan, Schedule, Sequence
from decode_pool.writeback import Block, WriteBack
from engine.api import Draw, EndReason, Engine, Row, Sampled
from engine.ending import end_of
from engine.pace import Pace
from engine.paging import Pages, pages_for
from kvcache_pool.api import Mover, Priority
from protocol.blocks import HashRoot, extend_hashes
from protocol.cluster import Manifest
from protocol.errors import BadMessage
from protocol.ids import BlockHash
from protocol.message import Message
from protocol.registry import Load
from protocol.rpc import Ask, Handler, handler

log = logging.getLogger("dango.decode")


@dataclass
class Stream:
    """One answer: its sequence, its client's items, and what it takes to name its blocks."""

    message: Decode
    sequence: Sequence
    root: HashRoot
    names: list[BlockHash]
    items: asyncio.Queue[Sampled | Exception | None]
    """Bounded by the context: an answer has no more tokens than that."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    output: list[int] = field(default_factory=list)
    ended: EndReason | None = None


class DecodeService:
    """Handlers for the instance's server, and the loop that steps the batch."""

    def __init__(
        self,
        engine: Engine,
        mover: Mover,
        writeback: WriteBack,
        manifest: Manifest,
        config: DecodeConfig,
        pace: Pace | None = None,
    ) -> None:
        self._engine = engine
        self._mover = mover
        self._writeback = writeback
        self._manifest = manifest
        self._step_tokens = engine.layout.block_tokens
        self._pages = Pages(engine.pages)
        self._schedule = Schedule(
            self._pages, self._step_tokens, config.batch_max, config.queue_max, config.chunk_tokens
        )
        self._streams: dict[Key, Stream] = {}
        self._work = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._pace = pace or Pace()
        self._step_began: float | None = None

    def handlers(self) -> Mapping[type[Message], Handler]:
        """What the instance's server answers."""
        return dict([handler(Decode, self.decode)])

    async def decode(self, message: Decode, ask: Ask) -> Ended:
        """Stream one answer. Cancelling takes it out of the batch before the next step."""
        stream = self._stream_of(message)
        if not self._schedule.add(stream.sequence):
            raise DecodeBusy("the decode queue is full, or has this request already")
        self._streams[stream.sequence.key] = stream
        self._mover.know(message.places)
        try:
            await ask.send(await self._load(stream))
            while (item := await stream.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                await ask.send(Token(item))
            assert stream.ended is not None
            return Ended(stream.ended)
        finally:
            await asyncio.shield(self._retire(stream))

    async def step_forever(self) -> None:
        """The one driver of the engine: step the batch, and again, until cancelled."""
        while True:
            async with self._between_steps:
                plans = self._schedule.step(self._preempted)
                if plans:
                    await self._step(plans)
            if not plans:
                self.check()
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(0)  # let those in who wait for the lock: joins, leaves

    def load(self) -> Load:
        """What this instance is doing, for its report."""
        now = asyncio.get_running_loop().time()
        return Load(
            running=self._schedule.running,
            waiting=self._schedule.waiting + self._schedule.loading,
            context_tokens=self._schedule.context_tokens,
            blocks_total=self._pages.total,
            blocks_free=self._pages.free,
            blocks_pending=self._schedule.pages_loading,
            steps=self._pace.steps,
            step_age_s=0.0 if self._step_began is None else now - self._step_began,
            step_s=self._pace.step_s,
            tokens_s=self._pace.tokens_s,
            preempted=self._schedule.preempted,
            timings=self._pace.timings(),
        )

    def check(self) -> None:
        """Asserts that no page and no stream is lost."""
        self._schedule.check()
        known = self._schedule.waiting + self._schedule.loading + self._schedule.running
        assert known <= len(self._streams)

    # -- one stream -------------------------------------------------------------------------------

    def _stream_of(self, message: Decode) -> Stream:
        """Refuse a message whose parts do not fit together, before anything is queued."""
        tokens = [*message.prompt, *message.output]
        stored = len(tokens) - 1
        longest = len(message.prompt) + message.sampling.max_tokens
        if not message.output or len(message.sources) != pages_for(stored, self._step_tokens):
            raise BadMessage("the sources do not cover all tokens but the last")
        if len(message.blocks) != stored // self._step_tokens:
            raise BadMessage("the full blocks of the sources are misnamed")
        if longest > self._manifest.context_tokens:
            raise TooLong(f"{longest} tokens are more than the context of {self._manifest.context_tokens}")
        if not self._schedule.fits(longest):
            raise TooLong(f"{longest} tokens do not fit in this instance's {self._pages.total} pages")
        sequence = Sequence((message.request, message.choice), tokens, stored)
        root = self._manifest.root(message.tenant, message.salt)
        items: asyncio.Queue[Sampled | Exception | None] = asyncio.Queue(longest + 1)
        return Stream(message, sequence, root, list(message.blocks), items, output=list(message.output))

    async def _load(self, stream: Stream) -> Joined:
        """Wait for pages, load the KV into them, join the batch. Blocks that fail are recomputed."""
        clock = asyncio.get_running_loop().time
        came = clock()
        self._admit()
        await stream.admitted.wait()
        admitted = clock()
        sequence, sources = stream.sequence, stream.message.sources
        good = len(sources)
        for layer in range(self._engine.layout.layers):
            pages = sequence.pages[:good]
            good = await self._mover.read(layer, sources[:good], self._engine.runs(layer), pages, Priority.LOAD)
        if good < len(sources):
            log.warning("recomputing from block %d", good, extra={"request": stream.message.request})
        self._join(stream, min(good * self._step_tokens, sequence.stored))
        return Joined(admitted - came, clock() - admitted)

    def _join(self, stream: Stream, computed: int) -> None:
        self._schedule.join(stream.sequence, computed)
        self._work.set()

    def _admit(self) -> None:
        """Give pages to those who wait. One that was preempted has nothing to load and joins at once."""
        for sequence in self._schedule.admit():
            stream = self._streams[sequence.key]
            if stream.admitted.is_set():
                self._join(stream, 0)
            stream.admitted.set()

    async def _retire(self, stream: Stream) -> None:
        """Take a stream out of the batch and free its pages; not while a step writes into them."""
        async with self._between_steps:
            self._schedule.remove(stream.sequence.key)
            del self._streams[stream.sequence.key]
            self._admit()

    def _preempted(self, sequence: Sequence) -> None:
        log.info("preempted: out of pages", extra={"request": sequence.key[0]})

    # -- one step ---------------------------------------------------------------------------------

    async def _step(self, plans: list[Plan]) -> None:
        clock = asyncio.get_running_loop().time
        self._step_began = began = clock()
        try:
            drawn = await asyncio.shield(self._engine.step([self._row(plan) for plan in plans]))
        except Exception as error:
            # The batch's fault ends its requests, never the loop that the next ones need.
            log.exception("a step failed")
            for plan in plans:
                self._end(self._streams[plan.sequence.key], error)
            return
        finally:
            self._step_began = None
        context = sum(plan.end for plan in plans)
        clean = all(plan.draws and plan.end == plan.start + 1 for plan in plans)
        self._pace.count(sum(plan.draws for plan in plans), context, clock() - began, clean=clean)
        for plan, samples in zip(plans, drawn, strict=True):
            self._apply(plan, samples[0] if plan.draws else None)

    def _row(self, plan: Plan) -> Row:
        sequence, stream = plan.sequence, self._streams[plan.sequence.key]
        draw = Draw(stream.message.sampling, stream.message.prompt, stream.output)
        tokens = sequence.tokens[plan.start : plan.end]
        return Row(tokens, plan.start, sequence.pages, [draw] if plan.draws else [])

    def _apply(self, plan: Plan, sampled: Sampled | None) -> None:
        stream = self._streams[plan.sequence.key]
        self._schedule.advance(plan, None if sampled is None else sampled.token)
        self._write_back(stream, plan)
        if sampled is None:
            return
        stream.output.append(sampled.token)
        stream.items.put_nowait(sampled)
        stream.ended = end_of(stream.message.sampling, stream.output)
        if stream.ended is not None:
            self._end(stream, None)

    def _end(self, stream: Stream, last: Exception | None) -> None:
        """No more steps for this stream; its handler sees `last` after the tokens."""
        self._schedule.remove(stream.sequence.key)
        stream.items.put_nowait(last)

    def _write_back(self, stream: Stream, plan: Plan) -> None:
        """Offer the block that this step filled, if it filled one, under its name in the chain."""
        step, end = self._step_tokens, plan.end
        if end % step or end // step <= len(stream.names):
            return
        stream.names = extend_hashes(stream.root, stream.names, plan.sequence.tokens[:end])
        page = plan.sequence.pages[end // step - 1]
        layers = range(self._engine.layout.layers)
        runs = np.stack([self._engine.runs(layer)[page : page + 1] for layer in layers])
        self._writeback.offer(Block(stream.message.request, list(stream.names), runs))
