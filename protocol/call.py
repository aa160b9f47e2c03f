"""One call as its client sees it: what came back and was not taken yet, in order, each answer once.

    deliver 0, 1, 1, 2 ──> [0 1 2] ──> take        a number that came already is dropped
    deliver 0, 2       ──> [0 PeerLost] ──> take   one that is missing ends the call

A stream with a hole is worth nothing: the caller asks again, elsewhere perhaps.
"""

import asyncio
from collections import deque
from typing import NamedTuple

from protocol.errors import BadMessage, DangoError, PeerLost, RemoteError
from protocol.frames import Header, Kind
from protocol.message import Message

STREAM_ITEMS_MAX = 1 << 18
"""Items that a client buffers of one stream: more tokens than any context holds, so only a fault fills it."""


class Answer(NamedTuple):
    """What came back: a message and the buffers beside it."""

    message: Message
    buffers: list[memoryview]


class Call:
    """An open call. One task at most waits in `take`. Mutates: deliver, end, take."""

    __slots__ = ("_answers", "_came", "_over", "_waiter", "served")

    def __init__(self) -> None:
        self.served = True
        """Whether the server may still be at it."""
        self._answers: deque[Answer | DangoError] = deque()
        self._came = 0
        """Answers so far: the number of the next."""
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        """Nothing more will be listened to."""

    async def take(self) -> Answer | None:
        """The next answer; None after the last. Raises what the callee raised, PeerLost or BadMessage."""
        while not self._answers:
            if self._over:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        answer = self._answers.popleft()
        if isinstance(answer, DangoError):
            raise answer
        return answer

    def deliver(self, header: Header, buffers: list[memoryview]) -> None:
        """Something came. Raises BadMessage, which ends the call too."""
        if self._over:
            return
        if header.kind is Kind.ERROR:
            self.end(RemoteError.of(header.tag, str(header.fields)))
            return
        if header.amount != self._came:
            if header.amount is None or header.amount > self._came:
                self._stop(PeerLost("an answer was lost on its way"))
            return
        self._came += 1
        try:
            answer = Answer(header.message(), buffers)
        except BadMessage as error:
            self._stop(error)
            raise
        if len(self._answers) >= STREAM_ITEMS_MAX:
            self._stop(BadMessage("a stream of more items than any context has tokens"))
            return
        self._answers.append(answer)
        if header.kind is Kind.REPLY:
            self._over, self.served = True, False
        self._wake()

    def end(self, error: DangoError) -> None:
        """The server failed, or is lost: this comes after what was delivered. Nothing, if the call is over."""
        if not self._over:
            self.served = False
            self._stop(error)

    def _stop(self, error: DangoError) -> None:
        self._over = True
        self._answers.append(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
