"""A transport that loses, doubles and delays what goes over it, and can be cut; and a clock that runs fast."""

import asyncio
import contextlib
import random
import selectors
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from protocol.errors import PeerLost
from protocol.frames import Buffer
from protocol.transport import Link, Port, Transport

FAST = 6.0
"""How many seconds of a fast loop's clock go by in one: leases, quarantines and deadlines come so much sooner."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout and timeout / FAST)
        return ready


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop whose time runs FAST times as fast as the real one. Sockets and threads are real."""

    def __init__(self) -> None:
        super().__init__(_Selector())

    def time(self) -> float:
        return super().time() * FAST


@dataclass(frozen=True)
class Odds:
    """Of each message, each way."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_s: float = 0.2


class FlakyTransport:
    """`inner`, whose links have these odds. `cut` makes a process that died without a word of its owner."""

    def __init__(self, inner: Transport, odds: Odds, rng: random.Random) -> None:
        self._inner = inner
        self.odds = odds
        self.rng = rng
        self.cut = False

    def connect(self, address: str) -> Link:
        return _FlakyLink(self._inner.connect(address), self)

    def bind(self, address: str) -> Port:
        return self._inner.bind(address)


class _FlakyLink:
    def __init__(self, inner: Link, of: FlakyTransport) -> None:
        self._inner = inner
        self._of = of
        self._again: list[list[memoryview]] = []
        self._later: set[asyncio.Task[None]] = set()

    async def send(self, frames: Sequence[Buffer]) -> None:
        if self._of.cut:
            return
        odds, draw = self._of.odds, self._of.rng.random()
        if draw < odds.lost:
            return
        if draw < odds.lost + odds.delayed:
            kept = [bytes(frame) for frame in frames]
            task = asyncio.create_task(self._send_later(kept, self._of.rng.random() * odds.delay_s))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
            return
        await self._inner.send(frames)
        if draw > 1.0 - odds.doubled:
            await self._inner.send(frames)

    async def _send_later(self, frames: Sequence[Buffer], delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
            await self._inner.send(frames)
        except PeerLost:
            return  # closed meanwhile

    async def receive(self) -> list[memoryview]:
        while True:
            if self._again:
                return self._again.pop()
            frames = await self._inner.receive()
            odds, draw = self._of.odds, self._of.rng.random()
            if draw < odds.lost:
                continue
            if draw > 1.0 - odds.doubled:
                self._again.append(frames)
            return frames

    def close(self) -> None:
        for task in self._later:
            task.cancel()
        self._inner.close()


class Relay:
    """A port between a reader and a segment's streams. What comes back is counted, and stops after `stop_at`
    bytes: until `go_on`; or for good, if there is a `when_cut`."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.stop_at: int | None = None
        self.came = 0
        self.when_cut: Callable[[], Awaitable[None]] | None = None
        """What happens at that moment. Then all connections end, and no new one is taken."""
        self.stopped = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go_on()
        self.cut()
        await self._server.wait_closed()

    def go_on(self) -> None:
        """What was stopped comes now."""
        self.stop_at = None
        self._goes_on.set()

    def cut(self) -> None:
        """End all, and take nobody."""
        self._server.close()
        for writer in self._open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, out = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self._open |= {writer, out}
        asks = asyncio.create_task(self._pump(reader, out, counted=False))
        try:
            await self._pump(there, writer, counted=True)
        finally:
            asks.cancel()
            await asyncio.gather(asks, return_exceptions=True)
            for one in (writer, out):
                one.close()
                self._open.discard(one)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if counted and self.stop_at is not None and self.came + len(data) > self.stop_at:
                    first = data[: max(0, self.stop_at - self.came)]
                    data = data[len(first) :]
                    await self._send(writer, first, counted)
                    self.stopped.set()
                    if self.when_cut is not None:
                        await self.when_cut()
                        self.cut()
                        return
                    await self._goes_on.wait()
                await self._send(writer, data, counted)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes, counted: bool) -> None:
        self.came += len(data) if counted else 0
        writer.write(data)
        await writer.drain()
