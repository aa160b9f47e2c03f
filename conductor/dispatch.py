"""The life of a request: one coroutine, read top to bottom.

hashes ─> lookup ─> place, judge ─> lease ─> prefill ─> first token ─> decode ... ─> release
                     │        │       └── or all on the decode instance ──┘
                     │        │                  └── what dies on the way is placed again, once,
                  refusal    hold                    with the tokens so far ──────────> end
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

from conductor.admission import Admission
from conductor.admitted import Admitted
from conductor.ask import Ask, Failed, Readiness, Refusal, Refused, Reply
from conductor.job import Choice, Job, Placed, acquire_message, decode_message, prefill_message, wanted_of
from conductor.lease import Countdown, HeldLease, Room
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.registry import Registry
from conductor.retries import Retries
from conductor.view import Instance, View
from decode_pool.api import DecodeBusy, Ended, Joined, Tokens
from engine.api import Sampled
from engine.ending import end_of
from kvcache_pool.api import DirectoryLink, Found, LeaseLost, PoolFull, QuotaExceeded
from prefill_pool.api import PrefillBusy, Prefilled, PrefixLost, StoreLost
from protocol.blocks import block_hashes
from protocol.errors import Abandoned, BadMessage, Broken, DangoError, DeadlineExceeded, PeerLost
from protocol.ids import BlockHash, Ids, RequestId
from protocol.message import Message
from protocol.rpc import Client
from protocol.tasks import together

LAST_WORD_S = 1.0
"""How long it may take to tell the clients of requests that are ended when the time to drain is over."""

RETRY_BUSY_S = 1.0
"""When to come back to a full queue: it turns over in about this time."""

ROUNDING_S = 0.001
"""Two deadlines that are meant to be the same differ by less."""

FAULTS = (PeerLost, Broken, PrefixLost, StoreLost)
"""Failures of an instance: its connection, its machine, or its way to the pool."""

AGAIN = (*FAULTS, Abandoned, DeadlineExceeded, LeaseLost)
"""Failures of an instance or of the pool, not of the request: another placement may well succeed."""

BUSY = (PoolFull, PrefillBusy, DecodeBusy)
"""Refusals of an instance that is full."""

log = logging.getLogger("dango.dispatch")


class Dispatcher:
    """Serves asks. Owns the count of requests in flight; everything else is handed in."""

    def __init__(
        self,
        view: View,
        peers: Peers,
        directory: DirectoryLink,
        registry: Registry,
        metrics: Metrics,
        admission: Admission,
        *,
        in_flight_max: int,
    ) -> None:
        self._view = view
        self._peers = peers
        self._directory = directory
        self._registry = registry
        self._metrics = metrics
        self._admission = admission
        self._in_flight_max = in_flight_max
        self._room = Room()
        self._retries = Retries(in_flight_max)
        self._in_flight = 0
        self._draining = False
        self._timeouts: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def readiness(self) -> Readiness:
        """Whether every pool has an instance that passed its self-test."""
        missing = ["the conductor is draining"] if self._draining else self._view.missing()
        return Readiness(not missing, missing, self._registry.degraded)

    async def drain(self, within_s: float) -> None:
        """Refuse new requests from now on; wait until the running ones have ended, and after `within_s` end
        them, each with an error that says why."""
        self._draining = True
        self._admission.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        for timeout in self._timeouts:
            if not timeout.expired():  # else it is ending already, and cannot be moved
                timeout.reschedule(asyncio.get_running_loop().time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._idle.wait()

    async def serve(self, ask: Ask, reply: Reply) -> None:
        """Answer; returns when every choice has ended. Raises Refused before the first token, or Failed."""
        choices = [Choice(index, sampling) for index, sampling in enumerate(ask.samplings)]
        job = Job(ask, reply, asyncio.get_running_loop().time() + ask.within_s, ask.request)
        with self._counted(), self._logged(job, choices):
            try:
                async with asyncio.timeout_at(job.ends_at) as timeout:
                    with self._abortable(timeout):
                        await self._serve(job, choices)
            except BUSY as error:
                reason = "quota" if isinstance(error, QuotaExceeded) else "pool_full"
                refusal = Refusal(reason, str(error), RETRY_BUSY_S, 429)
                raise _refused(refusal, choices) from error
            except Refused as error:
                raise _refused(error.refusal, choices) from error
            except (TimeoutError, DangoError) as error:
                raise Failed(self._why_failed(job, error)) from error

    def _why_failed(self, job: Job, error: Exception) -> str:
        """For the client. A call's deadline may be the request's own, or that of the directory."""
        if isinstance(error, TimeoutError) or job.left_s < ROUNDING_S:
            late = f"The request was not finished within {job.ask.within_s:.3g} s."
            return "The service is shutting down." if self._draining else late
        # What it says is about addresses and instances: for the log, not for the client.
        log.warning("failed: %s", error, extra={"request": job.request})
        return "The service lost an instance that this request needed; try again."

    async def _serve(self, job: Job, choices: list[Choice]) -> None:
        try:
            return await self._attempt(job, choices)
        except AGAIN as error:
            failure = error
        for choice in choices:
            await self._end_if_over(job, choice)
        # The choices have gone different ways by now, so each is a prompt, and a request, of its own.
        left = [(replace(job, request=RequestId(f"{job.request}.{c.index}")), c) for c in choices if not c.ended]
        if not self._retries.take(len(left)):
            self._metrics.not_replaced()
            raise failure
        log.warning("placed again: %s", failure, extra={"request": job.request})
        self._metrics.replaced()
        job.told.apart = len(left) > 1
        await together(self._attempt(again, [choice]) for again, choice in left)

    async def _attempt(self, job: Job, choices: list[Choice]) -> None:
        """One placement, from lookup to release. `choices` share their tokens so far."""
        ask, tokens = job.ask, job.ask.prompt + choices[0].output
        root = self._view.manifest.root(ask.tenant, ask.salt)
        blocks = block_hashes(root, tokens)
        wanted = wanted_of(job, choices, len(tokens), self._view.manifest.layout.block_tokens)
        with await self._admission.admit(
            wanted, lambda: self._lookup(blocks[: wanted.prompt.reusable])
        ) as admitted:
            job.admitted()
            self._metrics.placed()
            if admitted.rest is not None:
                blocks = blocks[: admitted.rest.reuse]
            tail = 1 if len(tokens) % self._view.manifest.layout.block_tokens else 0
            asked = acquire_message(job, admitted, blocks, tail, self._view.blocks_total)
            held = HeldLease(self._directory, self._room, asked)
            async with held as lease:
                placed = Placed(admitted, held, lease, tokens, blocks)
                firsts = zip(choices, await self._firsts(job, choices, placed), strict=True)
                joining = Countdown(len(choices), held)
                await together(self._follow(job, c, first, placed, joining) for c, first in firsts)

    async def _lookup(self, blocks: list[BlockHash]) -> Found | None:
        """How much of the prompt is cached, and where. None while there is nobody to compute the rest, or no
        answer: the prompt is cold then, which is no reason to fail."""
        if not self._view.missing():
            with contextlib.suppress(DangoError):
                return await self._directory.get().lookup(blocks)
        return None

    async def _firsts(self, job: Job, choices: list[Choice], placed: Placed) -> Sequence[Sampled | None]:
        """The first token of each choice; None if its decode instance will draw it, which computes the rest."""
        rest = placed.admitted.rest
        if rest is None:
            prefilled = await self._prefill(job, choices, placed)
            self._computed(job, placed.admitted, prefilled.reused_tokens)
            return prefilled.first
        if len(placed.lease.sources) < rest.reuse:
            raise LeaseLost("part of the prefix was evicted since the lookup: more would be left than was judged")
        return [None]

    def _computed(self, job: Job, admitted: Admitted, reused_tokens: int) -> None:
        """The prompt's KV is there, and the first token with it."""
        admitted.prefilled()
        if not admitted.wanted.promised and admitted.ttft_s > 0:
            self._metrics.predicted_ttft((_now() - admitted.began_at) / admitted.ttft_s)
        job.prefilled(reused_tokens)

    async def _prefill(self, job: Job, choices: list[Choice], placed: Placed) -> Prefilled:
        plan = placed.admitted.plan
        message = prefill_message(job, choices, placed, self._directory.address)
        async with self._watched(job, plan.prefill):
            prefilled = await self._peer(plan.prefill).call(message, Prefilled, within_s=job.left_s)
        if plan.source is not None and plan.own == 0 and prefilled.load_s:  # else its own may be what took long
            self._admission.estimates.learn_transfer(plan.source, plan.fetched_bytes, prefilled.load_s, _now())
        self._metrics.observe_queue(prefilled.queue_s)
        self._metrics.observe_prefill(prefilled.compute_s)
        self._metrics.observe_store_wait(prefilled.store_wait_s)
        return prefilled

    async def _follow(
        self, job: Job, choice: Choice, first: Sampled | None, placed: Placed, joining: Countdown
    ) -> None:
        """One choice from its first token to its end."""
        try:
            instance = await self._begin(job, choice, first, placed)
            if instance is None:
                joining.one()
            else:
                await self._go_on(job, choice, instance, placed, joining)
        except BaseException:
            self._admission.cut(placed.admitted, choice.index, len(choice.output))
            raise
        self._admission.ended(placed.admitted, choice.index, len(choice.output))

    async def _begin(self, job: Job, choice: Choice, first: Sampled | None, placed: Placed) -> Instance | None:
        """Send the first token, if it is there. Returns the decode instance that goes on; None if the answer ends.

        Where it goes on is settled before: until the client has its first token, it can still be refused.
        """
        if first is None:
            return placed.admitted.decode(choice.index)
        said = Tokens([first.token], [] if choice.sampling.logprobs is None else [first], [0.0])
        over = end_of(choice.sampling, choice.output + Ids("I", said.tokens)) is not None
        if over and placed.admitted.refused is not None:
            raise placed.admitted.refused  # of a request that is refused no choice says a word
        instance = None if over else await self._admission.hand_over(placed.admitted, choice.index)
        ended = await self._emit(job, choice, said) or await self._end_if_over(job, choice)
        return None if ended else instance

    async def _go_on(
        self, job: Job, choice: Choice, instance: Instance, placed: Placed, joining: Countdown
    ) -> None:
        """Decode: from the second token on, or from the rest of the prompt on."""
        choice.decode_from, message = _now(), decode_message(job, choice, placed)
        async with (
            self._watched(job, instance),
            self._peer(instance).stream(message, within_s=job.left_s) as stream,
        ):
            async for answer in stream:
                if await self._advance(job, choice, answer.message, placed, joining):
                    break
        self._metrics.observe_decode(_now() - choice.decode_from)

    async def _advance(self, job: Job, choice: Choice, item: Message, placed: Placed, joining: Countdown) -> bool:
        """Take in one item of a decode stream. True: nothing more is wanted of it."""
        admitted = placed.admitted
        match item:
            case Joined():
                step_s = self._admission.joined(admitted, choice.index)
                joining.one()
                if admitted.rest is None:
                    self._metrics.observe_transfer(item.queue_s + item.load_s)
                    choice.step_s = step_s
                else:
                    choice.joined = item
                return False
            case Tokens():
                if choice.joined is not None:
                    self._rest_computed(job, choice, choice.joined, placed)
                admitted.said(choice.index, len(item.tokens))
                if choice.step_s:
                    self._metrics.predicted_tbt(item.took_s[0] / choice.step_s)
                    choice.step_s = 0.0
                return await self._emit(job, choice, item)
            case Ended():
                choice.ended = True
                await job.reply.end(choice.index, item.reason)
                return False  # the stream ends by itself
        raise BadMessage(f"a decode stream brought a {type(item).__name__}")

    def _rest_computed(self, job: Job, choice: Choice, joined: Joined, placed: Placed) -> None:
        """The decode instance has computed the rest of the prompt: its first token is there."""
        now, rest, choice.joined = _now(), placed.admitted.rest, None
        assert rest is not None
        if rest.source is not None and all(grant.segment == rest.source for grant in placed.lease.sources):
            self._admission.estimates.learn_transfer(rest.source, rest.loaded_bytes, joined.load_s, now)
        self._metrics.rest_on_decode()
        self._metrics.observe_queue(joined.queue_s)
        self._metrics.observe_prefill(now - choice.decode_from - joined.queue_s)
        self._computed(job, placed.admitted, joined.loaded_tokens)
        choice.decode_from = now

    async def _emit(self, job: Job, choice: Choice, said: Tokens) -> bool:
        """Send tokens to the client. True: the client's stop string ended the choice."""
        choice.output.extend(said.tokens)
        job.told.tokens = True
        choice.ended = not await job.reply.tokens(choice.index, said)
        return choice.ended

    async def _end_if_over(self, job: Job, choice: Choice) -> bool:
        """End a choice whose last token has been said, whether or not an instance lived to say so."""
        if choice.ended or not choice.output:
            return choice.ended
        reason = end_of(choice.sampling, choice.output)
        if reason is not None:
            choice.ended = True
            await job.reply.end(choice.index, reason)
        return choice.ended

    def _peer(self, instance: Instance) -> Client:
        """The connection to an instance. Raises PeerLost if it was given up since the request was placed there: a
        connection that is made after that is nobody's to close."""
        if not self._view.lives(instance):
            raise PeerLost(f"{instance.name} was given up")
        return self._peers.of(instance)

    @contextlib.asynccontextmanager
    async def _watched(self, job: Job, instance: Instance) -> AsyncIterator[None]:
        """Remember whether `instance` did what it was given. If its connection breaks, place nothing more there
        until it registers again."""
        began, health = _now(), self._view.health
        try:
            yield
        except FAULTS as error:
            job.failed_by.add(instance.incarnation)
            if self._view.lives(instance) and health.failed(instance.incarnation, began, _now()):
                log.warning("ejected: %s", error, extra={"instance": instance.name})
                self._metrics.ejected(instance.pool)
            if isinstance(error, PeerLost):
                await self._registry.give_up(instance)
            raise
        health.succeeded(instance.incarnation, began)

    @contextlib.contextmanager
    def _logged(self, job: Job, choices: list[Choice]) -> Iterator[None]:
        """One line at the end of a request, whatever the end is: what an operator finds by its id."""
        outcome = "finished"
        try:
            yield
        except BaseException as error:
            outcome = {Refused: "refused", asyncio.CancelledError: "cancelled"}.get(type(error), "failed")
            raise
        finally:
            said = sum(len(choice.output) for choice in choices)
            extra = {
                "request": job.request,
                "outcome": outcome,
                "prompt_tokens": len(job.ask.prompt),
                "cached_tokens": job.reused_tokens,
                "output_tokens": said,
                "seconds": round(job.ask.within_s - job.left_s, 3),
            }
            log.info("ended", extra=extra)

    @contextlib.contextmanager
    def _abortable(self, timeout: asyncio.Timeout) -> Iterator[None]:
        self._timeouts.add(timeout)
        try:
            yield
        finally:
            self._timeouts.discard(timeout)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request in flight. Raises Refused beyond the bound."""
        if self._draining:
            raise Refused(Refusal("draining", "the service is shutting down", RETRY_BUSY_S))
        self._retries.came()
        if self._in_flight >= self._in_flight_max:
            text = f"{self._in_flight} requests are in flight, as many as are allowed"
            raise Refused(Refusal("queue_full", text, RETRY_BUSY_S, 429))
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()


def _refused(refusal: Refusal, choices: list[Choice]) -> Refused | Failed:
    """Before the first token a refusal is an answer; after it, the request has failed."""
    if any(choice.output for choice in choices):
        return Failed(f"The answer could not go on: {refusal.text}")
    return Refused(refusal)


def _now() -> float:
    return asyncio.get_running_loop().time()
