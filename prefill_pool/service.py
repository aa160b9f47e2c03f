"""A prefill instance: takes prompts, drives the engine one chunk at a time, answers with first tokens."""

import asyncio
import logging
from collections.abc import Mapping

from engine.api import Engine
from engine.pace import Pace
from engine.paging import Pages, pages_for
from kvcache_pool.api import DirectoryLink, Grant, Mover
from prefill_pool.api import Prefill, PrefillBusy, Prefilled
from prefill_pool.config import PrefillConfig
from prefill_pool.layerwise import Job
from prefill_pool.schedule import Chunk, Prompt, Schedule
from protocol.errors import BadMessage
from protocol.ids import RequestId
from protocol.message import Message
from protocol.registry import Load
from protocol.rpc import Ask, Handler, handler
from protocol.tasks import together

log = logging.getLogger("dango.prefill")


class PrefillService:
    """Handlers for the instance's server, and the loop that steps the engine."""

    def __init__(
        self,
        engine: Engine,
        mover: Mover,
        directory: DirectoryLink,
        config: PrefillConfig,
        pace: Pace | None = None,
    ) -> None:
        self._engine = engine
        self._mover = mover
        self._directory = directory
        self._pages = Pages(engine.pages)
        step = engine.layout.block_tokens
        self._schedule = Schedule(self._pages, step, config.chunk_tokens, config.queue_max)
        self._jobs: dict[RequestId, Job] = {}
        self._work = asyncio.Event()
        self._pace = pace or Pace()
        self._step_began: float | None = None

    def handlers(self) -> Mapping[type[Message], Handler]:
        """What the instance's server answers."""
        return dict([handler(Prefill, self.prefill)])

    async def prefill(self, message: Prefill, ask: Ask) -> Prefilled:
        """Compute one prompt. Cancelling stops it at the next layer and frees its pages."""
        self._require_sound(message)
        await self._directory.follow(message.directory)
        prompt = Prompt(message.request, len(message.tokens), self._tokens_of(message.sources))
        job = Job(message, prompt, self._engine, self._mover, self._directory)
        if not self._schedule.add(prompt):
            raise PrefillBusy("the prefill queue is full, or has this request already")
        self._jobs[message.request] = job
        self._mover.know(message.places)
        try:
            return await self._run(job)
        finally:
            await asyncio.shield(self._retire(job))

    async def step_forever(self) -> None:
        """The one driver of the engine: the next chunk, and the next, until cancelled."""
        while True:
            chunk = self._schedule.next()
            if chunk is None:
                self.check()
                self._work.clear()
                await self._work.wait()
            else:
                await self._compute(self._jobs[chunk.prompt.request], chunk)

    def load(self) -> Load:
        """What this instance is doing, for its report."""
        now = asyncio.get_running_loop().time()
        return Load(
            running=self._schedule.started,
            waiting=self._schedule.waiting,
            waiting_tokens=self._schedule.tokens_left,
            blocks_total=self._pages.total,
            blocks_free=self._pages.free,
            steps=self._pace.steps,
            step_age_s=0.0 if self._step_began is None else now - self._step_began,
            step_s=self._pace.step_s,
            tokens_s=self._pace.tokens_s,
            timings=self._pace.timings(),
        )

    def check(self) -> None:
        """Asserts that no page is lost."""
        self._schedule.check()
        assert self._schedule.started + self._schedule.waiting == len(self._jobs)

    async def _run(self, job: Job) -> Prefilled:
        clock = asyncio.get_running_loop().time
        came = clock()
        self._begin()
        await job.started.wait()
        started = clock()
        self._work.set()
        await together([job.load(), job.copy(), job.store(), job.until_computed()])
        return Prefilled(
            job.first,
            job.prompt.reused,
            queue_s=started - came,
            compute_s=job.computed_at - started,
            store_wait_s=clock() - job.computed_at,
            load_s=job.load_s,
        )

    async def _compute(self, job: Job, chunk: Chunk) -> None:
        clock = asyncio.get_running_loop().time
        self._step_began = began = clock()
        waited_s = job.waited_s
        job.idle.clear()
        try:
            await job.compute(chunk)
        except Exception as error:
            # One prompt's fault must not end the loop that all others depend on.
            log.exception("a pass failed", extra={"request": chunk.prompt.request})
            job.end(error)
            self._schedule.abandon(chunk.prompt.request)
        else:
            if not job.stopped:
                self._schedule.advance(chunk)
                computing_s = clock() - began - (job.waited_s - waited_s)
                self._pace.count(chunk.end - chunk.start, chunk.start, computing_s)
        finally:
            self._step_began = None
            job.idle.set()

    async def _retire(self, job: Job) -> None:
        """Stop computing this prompt, and free its pages once nobody touches them."""
        self._schedule.abandon(job.prompt.request)
        job.stop()
        await job.idle.wait()
        self._schedule.remove(job.prompt.request)
        del self._jobs[job.prompt.request]
        self._begin()

    def _begin(self) -> None:
        for prompt in self._schedule.start():
            self._jobs[prompt.request].started.set()

    def _tokens_of(self, grants: list[Grant]) -> int:
        return len(grants) * self._engine.layout.block_tokens

    def _require_sound(self, message: Prefill) -> None:
        """Refuse a message whose parts do not fit together, before anything is queued. Raises BadMessage."""
        tokens, step = len(message.tokens), self._engine.layout.block_tokens
        blocks = pages_for(tokens, step)
        if not 0 < message.prompt_tokens <= tokens or not self._schedule.fits(tokens):
            raise BadMessage(f"a prompt of {tokens} tokens cannot be computed here")
        if len(message.sources) + len(message.targets) != blocks or len(message.blocks) != tokens // step:
            raise BadMessage("sources and targets do not cover the prompt, or its blocks are misnamed")
        if self._tokens_of(message.sources) >= tokens:
            raise BadMessage("at least one token must be left to compute: its logits are the answer")
        if not {copy.source for copy in message.copies} <= set(range(len(message.sources))):
            raise BadMessage("a copy is of a source")
