"""A dispatcher that plays what a test wrote: tokens, delays, refusals, failures. It remembers who left."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from conductor.ask import Ask, Readiness, Reply
from decode_pool.api import Tokens
from engine.api import EndReason, Sampled, Sampling
from engine.ending import end_of
from protocol.tasks import together


@dataclass
class Play:
    """How every request goes. The tokens start anew when an answer is longer."""

    tokens: Sequence[int] = (40, 41, 42)
    first_s: float = 0.0
    """Before the first token."""
    gap_s: float = 0.0
    """Before every other token."""
    reused: int = 0
    error: Exception | None = None
    error_after: int = 0
    """So many tokens of a choice come before the error."""
    top: Sequence[tuple[int, float]] = ()
    """The likeliest tokens, if a request asks for them."""
    logprob: float = -0.5
    stop_after: int | None = None
    """The answer ends by itself after so many tokens (the model's own choice)."""


@dataclass
class Scripted:
    """Implements Serve. `cancelled` and `finished` hold the names of requests."""

    play: Play = field(default_factory=Play)
    missing: list[str] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    tokens_sent: int = 0
    running: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def readiness(self) -> Readiness:
        return Readiness(not self.missing, self.missing)

    async def serve(self, ask: Ask, reply: Reply) -> None:
        self.asks.append(ask)
        await self._run(1)
        try:
            await self._serve(ask, reply)
            self.finished.append(ask.request)
        except asyncio.CancelledError:
            self.cancelled.append(ask.request)
            raise
        finally:
            await self._run(-1)

    async def _run(self, more: int) -> None:
        self.running += more
        async with self.changed:
            self.changed.notify_all()

    async def idle(self, within_s: float = 3.0) -> None:
        """Returns when nothing runs any more; TimeoutError if something does for too long."""
        async with asyncio.timeout(within_s), self.changed:
            await self.changed.wait_for(lambda: not self.running)

    async def busy(self, requests: int = 1, within_s: float = 3.0) -> None:
        """Returns when so many requests have arrived since the start, and one still runs."""
        async with asyncio.timeout(within_s), self.changed:
            await self.changed.wait_for(lambda: self.running > 0 and len(self.asks) >= requests)

    async def _serve(self, ask: Ask, reply: Reply) -> None:
        await asyncio.sleep(self.play.first_s)
        if self.play.error is not None and self.play.error_after == 0:
            raise self.play.error
        reply.admitted()
        reply.prefilled(self.play.reused)
        await together(self._choice(choice, sampling, reply) for choice, sampling in enumerate(ask.samplings))

    async def _choice(self, choice: int, sampling: Sampling, reply: Reply) -> None:
        output: list[int] = []
        for token in itertools.cycle(self.play.tokens):
            output.append(token)
            self.tokens_sent += 1
            if not await reply.tokens(choice, Tokens([token], self._details(token, sampling), [self.play.gap_s])):
                return
            reason = end_of(sampling, output)
            if reason is None and len(output) == self.play.stop_after:
                reason = EndReason.STOP
            if reason is not None:
                return await reply.end(choice, reason)
            if self.play.error is not None and len(output) == self.play.error_after:
                raise self.play.error
            await asyncio.sleep(self.play.gap_s)

    def _details(self, token: int, sampling: Sampling) -> list[Sampled]:
        if sampling.logprobs is None:
            return []
        top = list(self.play.top)[: sampling.logprobs]
        return [Sampled(token, self.play.logprob, [token for token, _ in top], [value for _, value in top])]
