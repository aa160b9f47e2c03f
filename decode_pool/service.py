"""A decode instance: loads KV that others computed, steps its whole batch, streams tokens.

What is missing of a request's KV it computes itself, in chunks beside the batch."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from decode_pool.api import Decode, DecodeBusy, Ended, Joined, Tokens, TooLong
from decode_pool.config import DecodeConfig
from decode_pool.schedule import Key, Plan, Schedule, Sequence
from decode_pool.writeback import Filled, WriteBack
from engine.api import Draw, EndReason, Engine, Row, Sampled
from engine.ending import end_of
from engine.pace import Pace
from engine.paging import Pages, pages_for
from kvcache_pool.api import Grant, Mover, Priority
from protocol.blocks import HashRoot, extend_hashes
from protocol.cluster import Manifest
from protocol.errors import BadMessage
from protocol.ids import BlockHash, Ids, tenant_id
from protocol.inbox import Inbox
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
    output: Ids
    draws: list[Draw]
    """What each of its steps draws: one token, after `output`."""
    items: Inbox[Tokens | Exception | None] = field(default_factory=Inbox)
    """Bounded by the context: an answer has no more tokens than that."""
    unsent: Tokens = field(default_factory=lambda: Tokens([], [], []))
    """Drawn, and gathered for the next item."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
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
        self._rows_max = config.batch_max
        self._steps_max = config.steps_max
        self._stream_interval = config.stream_interval
        self._writes_back = config.write_back
        self._work = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._leaving = 0
        """How many streams wait for the lock to be taken out."""
        self._enough = asyncio.Event()
        """Set when the batch is about to change: the run of steps under way ends with its step."""
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
                await ask.send(item)
            assert stream.ended is not None
            return Ended(stream.ended)
        finally:
            if self._streams.get(stream.sequence.key) is stream:
                await asyncio.shield(self._retire(stream))

    async def step_forever(self) -> None:
        """The one driver of the engine: step the batch, and again, until cancelled."""
        while True:
            async with self._between_steps:
                if not self._leaving:
                    self._enough.clear()
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
            rows_max=self._rows_max,
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
        tokens = message.prompt + message.output
        if not message.prompt or message.chunk_tokens < 0:
            raise BadMessage("a request has a prompt, and chunks are not negative")
        stored = min(len(message.sources) * self._step_tokens, len(tokens) - 1)
        longest = len(message.prompt) + message.sampling.max_tokens
        if len(message.sources) != pages_for(stored, self._step_tokens):
            raise BadMessage("the sources cover more than all tokens but the last")
        if len(message.blocks) != stored // self._step_tokens:
            raise BadMessage("the full blocks of the sources are misnamed")
        if longest > self._manifest.context_tokens:
            raise TooLong(f"{longest} tokens are more than the context of {self._manifest.context_tokens}")
        if not self._schedule.fits(longest):
            raise TooLong(f"{longest} tokens do not fit in this instance's {self._pages.total} pages")
        sequence = Sequence((message.request, message.choice), tokens, stored, message.chunk_tokens)
        root = self._manifest.root(message.tenant, message.salt)
        output = message.output[:]
        draws = [Draw(message.sampling, message.prompt, output)]
        return Stream(message, sequence, root, message.blocks, output, draws)

    async def _load(self, stream: Stream) -> Joined:
        """Wait for pages, load the KV into them, join the batch. Blocks that fail are recomputed."""
        clock = asyncio.get_running_loop().time
        came = clock()
        self._admit()
        await stream.admitted.wait()
        admitted = clock()
        sequence, sources = stream.sequence, stream.message.sources
        good = await self._read(sources, sequence.pages[: len(sources)])
        if good < len(sources):
            log.warning("recomputing from block %d", good, extra={"request": stream.message.request})
        loaded = min(good * self._step_tokens, sequence.stored)
        self._join(stream, loaded)
        if good < len(stream.message.blocks):
            self._writeback.forget(sources[good])
        return Joined(admitted - came, clock() - admitted, loaded)

    async def _read(self, sources: list[Grant], pages: list[int]) -> int:
        """Load blocks into pages, whole or layer by layer: nothing of this request is computed before all are
        there. How many leading ones are good."""
        if self._mover.in_bulk(sources):
            blocks = [self._engine.block(page) for page in pages]
            return await self._mover.read_blocks(sources, blocks, Priority.LOAD)
        good = len(sources)
        for layer in range(self._engine.layout.layers):
            runs = self._engine.runs(layer)
            good = await self._mover.read(layer, sources[:good], runs, pages[:good], Priority.LOAD)
        return good

    def _join(self, stream: Stream, computed: int) -> None:
        self._schedule.join(stream.sequence, computed)
        self._work.set()
        self._enough.set()

    def _admit(self) -> None:
        """Give pages to those who wait. One that was preempted has nothing to load and joins at once."""
        for sequence in self._schedule.admit():
            stream = self._streams[sequence.key]
            if stream.admitted.is_set():
                self._join(stream, 0)
            stream.admitted.set()

    async def _retire(self, stream: Stream) -> None:
        """Take out a stream whose client left, and free its pages; not while a step writes into them."""
        self._leaving += 1
        self._enough.set()
        try:
            async with self._between_steps:
                if self._streams.get(stream.sequence.key) is stream:  # else it ended while this waited
                    self._forget(stream)
        finally:
            self._leaving -= 1

    def _forget(self, stream: Stream) -> None:
        self._schedule.remove(stream.sequence.key)
        del self._streams[stream.sequence.key]
        self._admit()

    def _preempted(self, sequence: Sequence) -> None:
        log.info("preempted: out of pages", extra={"request": sequence.key[0]})

    # -- one step ---------------------------------------------------------------------------------

    async def _step(self, plans: list[Plan]) -> None:
        clock = asyncio.get_running_loop().time
        streams = [self._streams[plan.sequence.key] for plan in plans]
        self._step_began = began = clock()
        try:
            drawn = await asyncio.shield(self._compute(plans, streams))
        except Exception as error:
            # The batch's fault ends its requests, never the loop that the next ones need.
            log.exception("a step failed")
            for stream in streams:
                self._end(stream, error)
            return
        finally:
            self._step_began = None
            self._enough.set()  # if this was cancelled, the engine shall not go on for long
        over_s = clock() - began
        self._count(plans, max(map(len, drawn)), over_s)
        for plan, stream, samples in zip(plans, streams, drawn, strict=True):
            self._apply(plan, stream, samples, over_s)

    async def _compute(self, plans: list[Plan], streams: list[Stream]) -> list[list[Sampled]]:
        """One step; or a run of them, while nothing but the length of the answers changes."""
        rows = [_row(plan, stream) for plan, stream in zip(plans, streams, strict=True)]
        if not all(plan.plain for plan in plans):
            return await self._engine.step(rows)
        left = min(stream.message.sampling.max_tokens - len(stream.output) for stream in streams)
        begun = all(stream.output for stream in streams)
        most = self._steps_max if begun else 1  # a first token does not wait for others
        steps = min(most, self._schedule.steps_on(plans), left)
        return await self._engine.run(rows, steps, self._enough)

    def _count(self, plans: list[Plan], steps: int, seconds: float) -> None:
        plain = [plan for plan in plans if plan.plain]
        context = sum(plan.end for plan in plain) + len(plain) * (steps - 1) // 2
        others = [plan for plan in plans if not plan.plain]
        rest, prefix = (others[0].end - others[0].start, others[0].start) if others else (0, 0)
        clean = len(others) <= 1
        self._pace.count(len(plain), context, seconds, max(steps, 1), clean=clean, rest=rest, prefix=prefix)

    def _apply(self, plan: Plan, stream: Stream, samples: list[Sampled], over_s: float) -> None:
        tokens = [sampled.token for sampled in samples]
        self._schedule.advance(plan, tokens)
        self._write_back(stream)
        if not tokens:
            return
        stream.output.extend(tokens)
        said = stream.unsent
        said.tokens.extend(tokens)
        said.took_s.extend([over_s / len(tokens)] * len(tokens))
        if stream.message.sampling.logprobs is not None:
            said.details.extend(samples)
        stream.ended = end_of(stream.message.sampling, stream.output)
        first = len(said.tokens) == len(stream.output)
        if stream.ended is not None or first or len(said.tokens) >= self._stream_interval:
            stream.items.put(said)
            stream.unsent = Tokens([], [], [])
        if stream.ended is not None:
            self._end(stream, None)

    def _end(self, stream: Stream, last: Exception | None) -> None:
        """No more steps for this stream; its handler sees `last` after the tokens."""
        self._forget(stream)
        stream.items.put(last)

    def _write_back(self, stream: Stream) -> None:
        """Offer the blocks that have just been filled, under their names in the chain: those of the prompt, and
        those of the answer if they are wanted."""
        sequence, step, message = stream.sequence, self._step_tokens, stream.message
        whole = sequence.computed if self._writes_back else min(sequence.computed, len(message.prompt))
        first, filled = len(stream.names), whole // step
        if filled <= first:
            return
        stream.names = extend_hashes(stream.root, stream.names, sequence.tokens[: filled * step])
        pages, layers = sequence.pages[first:filled], range(self._engine.layout.layers)
        runs = np.stack([self._engine.runs(layer)[pages] for layer in layers])
        tokens = sequence.tokens[first * step : filled * step]
        tenant = tenant_id(message.tenant)
        self._writeback.offer(Filled(message.request, list(stream.names), runs, tokens, message.near, tenant))


def _row(plan: Plan, stream: Stream) -> Row:
    sequence = plan.sequence
    tokens = sequence.tokens[plan.start : plan.end]
    return Row(tokens, plan.start, sequence.pages, stream.draws if plan.draws else [])
