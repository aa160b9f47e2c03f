"""Calls between processes: ask and get one answer, or a stream of them; cancel; deadlines; lost peers.

    client                                   server
      CALL n  ────────────────────────────>  a handler runs as a task, or answers at once
      ALIVE   ──── while calls are open ──>  (a silent client's calls are cancelled after SILENT_S)
              <──────────────  ITEM n ...    what the handler sends
              <──────────────  REPLY n       what the handler returns   } exactly one of these,
              <──────────────  ERROR n       what the handler raised    } unless the client cancelled
      CANCEL n ───────────────────────────>  the task is cancelled

A client whose connection breaks fails all its open calls with PeerLost at once. The next call goes to
whoever listens there then: retrying is the caller's decision. Answers are numbered, and so are calls: what comes
twice is dropped, and a call of whose answers one is missing fails with PeerLost.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, TypeVar

from protocol.call import Answer, Call
from protocol.errors import (
    Abandoned,
    BadMessage,
    Broken,
    DangoError,
    DeadlineExceeded,
    PeerLost,
    RemoteError,
)
from protocol.frames import Buffer, Header, Kind, decode, encode, encode_error
from protocol.message import Message
from protocol.transport import Link, Port, Transport

ALIVE_EVERY_S = 1.0
SILENT_S = 5.0
"""Five beats missed: the client is gone, and what it asked for is wasted work."""

CONNECT_S = 2.0
"""A process on the same network that cannot be reached for this long is not there."""

CALLS_MAX = 4096
"""Open calls of one server. A Conductor bounds its requests far below; this stops a client gone mad."""

CALL_S_MAX = 3600.0
"""No call runs longer, whatever its caller says."""

log = logging.getLogger("dango.rpc")
M = TypeVar("M", bound=Message)


class Client:
    """One connection to one server. Use `async with`, or `start` and `aclose`."""

    def __init__(self, transport: Transport, address: str) -> None:
        self.address = address
        self._transport = transport
        self._link: Link | None = None
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.bad_frames = 0

    def start(self) -> "Client":
        """Connect, and begin to receive. The client owns two tasks until `aclose`."""
        self._link = self._transport.connect(self.address)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        return self

    async def aclose(self) -> None:
        """Fail what is open and end the tasks. All is done before the only wait: it may be cancelled."""
        for task in self._tasks:
            task.cancel()
        self._fail_all(PeerLost(f"the client of {self.address} was closed"))
        if self._link is not None:
            self._link.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "Client":
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def call(self, message: Message, expect: type[M], *buffers: Buffer, within_s: float) -> M:
        """Ask; return the answer. Raises what the callee raised, PeerLost, or DeadlineExceeded."""
        answer = await self.call_raw(message, *buffers, within_s=within_s)
        if not isinstance(answer.message, expect):
            raise BadMessage(f"{self.address} answered {type(answer.message).__name__}, not {expect.__name__}")
        return answer.message

    async def call_raw(self, message: Message, *buffers: Buffer, within_s: float) -> Answer:
        """As `call`, with the buffers that came beside the answer."""
        async with self.stream(message, *buffers, within_s=within_s) as stream:
            async for answer in stream:
                return answer
        raise BadMessage(f"{self.address} ended a call without an answer")

    def stream(self, message: Message, *buffers: Buffer, within_s: float) -> "Stream":
        """Ask; iterate over the answers. Leaving the `async with` early cancels the call."""
        return Stream(self, message, buffers, within_s)

    async def open(self, message: Message, buffers: Sequence[Buffer], within_s: float) -> int:
        """Send a CALL; returns its number. Waits while nobody listens. (For Stream.)"""
        assert self._link is not None, "start the client first"
        number = next(self._numbers)
        self._open[number] = Call()
        try:
            await self._link.send([encode(Kind.CALL, number, message, within_s), *buffers])
        except BaseException:
            del self._open[number]
            raise
        return number

    def take(self, number: int) -> Awaitable[Answer | None]:
        """The next answer to a call; None after the last. (For Stream.)"""
        return self._open[number].take()

    async def shut(self, number: int) -> None:
        """Forget a call; tell the server if it has not ended. (For Stream.)"""
        call = self._open.pop(number)
        if not call.served or self._link is None:
            return
        with contextlib.suppress(TimeoutError, PeerLost):  # unreachable: the server notices that we are silent
            async with asyncio.timeout(CONNECT_S):
                await self._link.send([encode(Kind.CANCEL, number)])

    async def _receive(self) -> None:
        assert self._link is not None
        while True:
            try:
                frames = await self._link.receive()
            except PeerLost as error:
                self._fail_all(error)
                continue
            try:
                self._deliver(*decode(frames))
            except BadMessage as error:
                self.bad_frames += 1
                log.warning("dropped a frame from %s: %s", self.address, error)

    def _deliver(self, header: Header, buffers: list[memoryview]) -> None:
        call = self._open.get(header.call)
        if call is not None:  # else cancelled meanwhile
            call.deliver(header, buffers)

    def _fail_all(self, error: PeerLost) -> None:
        for call in self._open.values():
            call.end(error)

    async def _beat(self) -> None:
        assert self._link is not None
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            if self._open:
                await self._link.send([encode(Kind.ALIVE, 0)])


class Stream:
    """The answers to one call, under one deadline. An async context manager and iterator."""

    def __init__(self, client: Client, message: Message, buffers: Sequence[Buffer], within_s: float) -> None:
        self._client = client
        self._ask = (message, buffers, within_s)
        self._number = 0
        self._timeout = asyncio.timeout(min(within_s, CONNECT_S))

    async def __aenter__(self) -> "Stream":
        message, buffers, within_s = self._ask
        ends_at = asyncio.get_running_loop().time() + within_s
        await self._timeout.__aenter__()
        try:
            self._number = await self._client.open(message, buffers, within_s)
        except BaseException as error:
            await self._end_timeout(type(error), error, error.__traceback__)
            raise
        if within_s > CONNECT_S:
            self._timeout.reschedule(ends_at)
        return self

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Answer:
        answer = await self._client.take(self._number)
        if answer is None:
            raise StopAsyncIteration
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._client.shut(self._number)
        finally:
            await self._end_timeout(kind, error, trace)

    async def _end_timeout(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            (message, _, within_s), address = self._ask, self._client.address
            if not self._number and within_s > CONNECT_S:
                raise PeerLost(f"nobody listens at {address}") from late
            text = f"{type(message).__name__} at {address} took over {within_s:.3g} s"
            raise DeadlineExceeded(text) from late


class Ask(NamedTuple):
    """What a handler is given beside the message."""

    buffers: list[memoryview]
    within_s: float
    """Seconds that were left of the caller's deadline when the call arrived."""
    send: Callable[..., Awaitable[None]]
    """`await ask.send(message, *buffers)` sends an item of a stream before the final answer."""


class Handler(NamedTuple):
    """What answers one kind of message."""

    run: Callable[[Message, Ask], Awaitable[Message | Answer]]
    at_once: bool
    """Whether it never waits for anything: it then needs no task of its own."""


def handler(
    kind: type[M], function: Callable[[M, Ask], Awaitable[Message | Answer]]
) -> tuple[type[Message], Handler]:
    """A row of the table that `Server` takes: which function answers which message."""

    async def run(message: Message, ask: Ask) -> Message | Answer:
        assert isinstance(message, kind)
        return await function(message, ask)

    return kind, Handler(run, at_once=False)


def at_once(kind: type[M], function: Callable[[M], Message]) -> tuple[type[Message], Handler]:
    """As `handler`, of a function that answers from memory: while it runs, the server does nothing else."""

    async def run(message: Message, _: Ask) -> Message:
        assert isinstance(message, kind)
        return function(message)

    return kind, Handler(run, at_once=True)


@dataclass(slots=True)
class _Running:
    """A call that a server works at."""

    task: asyncio.Task[None]
    ends_at: float
    """Its deadline."""


class Server:
    """Answers calls at one port. `serve` runs until cancelled; then every open call is cancelled too."""

    def __init__(self, port: Port, handlers: Mapping[type[Message], Handler]) -> None:
        self.address = port.address
        self._port = port
        self._handlers = handlers
        self._open: dict[tuple[bytes, int], _Running] = {}
        self._heard: dict[bytes, float] = {}
        self._last: dict[bytes, int] = {}  # of each peer's calls: a client's numbers grow
        self.bad_frames = 0
        """Frames dropped because they were no message of ours."""

    @property
    def calls(self) -> int:
        """Open calls."""
        return len(self._open)

    async def serve(self) -> None:
        """Receive and answer until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep())
                while True:
                    peer, frames = await self._port.receive()
                    await self._accept(tasks, peer, frames)
        finally:
            self._port.close()

    async def _accept(self, tasks: asyncio.TaskGroup, peer: bytes, frames: list[memoryview]) -> None:
        self._heard[peer] = asyncio.get_running_loop().time()
        try:
            header, buffers = decode(frames)
            if header.kind is Kind.CALL:
                await self._start(tasks, peer, header, buffers)
            elif header.kind is Kind.CANCEL:
                self._cancel(peer, header.call)
        except BadMessage as error:
            self.bad_frames += 1
            if self.bad_frames.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a flood must not fill the log
                log.warning("dropped a frame, number %d: %s", self.bad_frames, error)

    async def _start(
        self, tasks: asyncio.TaskGroup, peer: bytes, header: Header, buffers: list[memoryview]
    ) -> None:
        if header.call <= self._last.get(peer, -1):
            raise BadMessage(f"call {header.call} came twice")  # no answer: the first one has its own
        try:
            message = header.message()
            answering = self._handlers.get(type(message))
            if answering is None:
                raise BadMessage(f"{header.tag[:64]!r} is not served here")
        except BadMessage as error:
            await self._answer(peer, encode_error(header.call, "bad_message", str(error)))
            raise
        if len(self._open) >= CALLS_MAX:
            await self._answer(peer, encode_error(header.call, "busy", f"{CALLS_MAX} calls are open"))
            return
        self._last[peer] = header.call
        within_s = CALL_S_MAX if header.amount is None else min(header.amount, CALL_S_MAX)
        run = self._run(answering, message, (peer, header.call), within_s, buffers)
        if answering.at_once:
            await run
        else:
            self._open[peer, header.call] = _Running(tasks.create_task(run), self._heard[peer] + within_s)

    async def _run(
        self,
        answering: Handler,
        message: Message,
        key: tuple[bytes, int],
        within_s: float,
        buffers: list[memoryview],
    ) -> None:
        (peer, number), sent = key, itertools.count()

        async def send(item: Message, *beside: Buffer) -> None:
            await self._port.send(peer, [encode(Kind.ITEM, number, item, next(sent)), *beside])

        try:
            reply = await answering.run(message, Ask(buffers, within_s, send))
            answer = reply if isinstance(reply, Answer) else Answer(reply, [])
            await self._answer(peer, encode(Kind.REPLY, number, answer.message, next(sent)), *answer.buffers)
        except RemoteError as error:
            await self._answer(peer, encode_error(number, error.kind, str(error)))
        except (DangoError, TimeoutError) as error:
            await self._answer(peer, encode_error(number, "error", f"{type(error).__name__}: {error}"))
        except Exception:
            # A fault of ours must reach the one who waits, and must not end the other calls.
            # What it says may be about others: it goes to the log alone.
            log.exception("%s failed", type(message).__name__)
            await self._answer(peer, encode_error(number, Broken.kind, f"{type(message).__name__} failed"))
        finally:
            self._open.pop(key, None)

    async def _answer(self, peer: bytes, header: bytes, *buffers: Buffer) -> None:
        with contextlib.suppress(PeerLost):  # nobody is left to be told
            await self._port.send(peer, [header, *buffers])

    def _cancel(self, peer: bytes, number: int) -> None:
        running = self._open.get((peer, number))
        if running is not None:
            running.task.cancel()

    async def _sweep(self) -> None:
        """Cancel the calls of clients that have gone silent, and forget them; and those whose deadline is over.

        Who calls keeps the deadline too, and cancels: what is found here are the calls of those who cannot.
        """
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            now = asyncio.get_running_loop().time()
            silent = {peer for peer, heard in self._heard.items() if heard < now - SILENT_S}
            for peer in silent:
                del self._heard[peer]
                self._last.pop(peer, None)
            for (peer, number), running in list(self._open.items()):
                if peer in silent:
                    await self._abandon(peer, number, running, f"nothing was heard of the caller for {SILENT_S} s")
                elif running.ends_at < now:
                    await self._abandon(peer, number, running, "the time that the caller gave is over")

    async def _abandon(self, peer: bytes, number: int, running: _Running, text: str) -> None:
        """Should the client live after all, it must not wait for what will never come."""
        running.task.cancel()
        running.ends_at = math.inf  # once is enough, however long it takes to end
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await self._answer(peer, encode_error(number, Abandoned.kind, text))


async def items(stream: Stream) -> AsyncIterator[Message]:
    """The messages of a stream, without their buffers."""
    async for answer in stream:
        yield answer.message
