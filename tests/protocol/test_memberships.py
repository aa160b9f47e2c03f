"""One instance, several Conductors: over real sockets, with Conductors that say what the test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from protocol.ids import Incarnation, InstanceId
from protocol.memberships import Memberships
from protocol.message import Message
from protocol.registry import Heard, Leave, Load, Pool, Register, Report, Superseded, Timing, Welcome
from protocol.rpc import Ask, Server, handler
from protocol.zmq_transport import ZmqTransport
from tests.fakes import MANIFEST

WITHIN_S = 10.0
PACE_S = 0.02
IDENTITY = Register(InstanceId("decode-0"), Incarnation("one"), Pool.DECODE, "tcp://127.0.0.1:1", "h", MANIFEST)


class Council:
    """A Conductor as an instance sees it."""

    def __init__(self, transport: ZmqTransport) -> None:
        handlers = dict([handler(Register, self._hear), handler(Report, self._hear), handler(Leave, self._hear)])
        self.server = Server(transport.bind("tcp://127.0.0.1:0"), handlers)
        self.address = self.server.address
        self.said: list[Message] = []
        self.news = Heard(True, "tcp://d:1", report_s=PACE_S)
        self.refuses = False
        self.mute = False
        self.task = asyncio.create_task(self.server.serve())

    async def _hear(self, message: Message, _: Ask) -> Message:
        self.said.append(message)
        if self.mute:
            await asyncio.sleep(WITHIN_S)
        if self.refuses:
            raise Superseded("there is a newer one")
        return Welcome(self.news) if isinstance(message, Register) else self.news

    def names(self, *others: "Council") -> None:
        addresses = [council.address for council in (self, *others)]
        self.news = Heard(True, "tcp://d:1", report_s=PACE_S, conductors=addresses)

    def heard(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.said)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def councils(count: int) -> AsyncIterator[list[Council]]:
    transport = ZmqTransport()
    made = [Council(transport) for _ in range(count)]
    try:
        yield made
    finally:
        for council in made:
            await council.end()
        transport.close()


@asynccontextmanager
async def an_instance(
    *configured: Council, load: Callable[[], Load] = Load
) -> AsyncIterator[tuple[asyncio.Task[None], list[Heard]]]:
    transport, told = ZmqTransport(), []

    async def heard(news: Heard) -> None:
        told.append(news)

    memberships = Memberships(transport, [c.address for c in configured], IDENTITY, load, heard)
    task = asyncio.create_task(memberships.run())
    try:
        yield task, told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        transport.close()


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not seen():  # noqa: ASYNC110 - a test may poll
            await asyncio.sleep(0.01)


async def test_an_instance_reports_to_whom_its_conductor_names_and_bids_all_farewell() -> None:
    async with councils(2) as (first, second):
        first.names(second)
        second.names(first)
        async with an_instance(first):
            await until(lambda: first.heard(Report) > 2 and second.heard(Report) > 2)
        assert (first.heard(Register), second.heard(Register)) == (1, 1)
        assert (first.heard(Leave), second.heard(Leave)) == (1, 1)


async def test_every_conductor_is_told_every_timing_once() -> None:
    """Asking a service for its load takes the timings out of it."""
    made = [Timing(n, 1, 1, 0.1) for n in range(200)]
    left = made.copy()

    def load() -> Load:
        return Load(timings=[left.pop(0)] if left else [])

    async with councils(2) as (first, second):
        first.names(second)
        second.names(first)

        def told(council: Council) -> list[Timing]:
            return [t for m in council.said if isinstance(m, Report) for t in m.load.timings]

        async with an_instance(first, second, load=load):
            await until(lambda: not left and told(first)[-1:] == told(second)[-1:] == made[-1:])
        assert told(first) == made[-len(told(first)) :]
        assert told(second) == made[-len(told(second)) :]
        assert min(len(told(first)), len(told(second))) > len(made) / 2, "but for those before it registered"


async def test_an_unnamed_conductor_that_does_not_answer_is_left_without_a_word() -> None:
    """It may be the one who is cut off: told of an end, it would refuse this life of the instance for ever."""
    async with councils(2) as (first, second):
        first.names(second)
        second.names(first)
        async with an_instance(first) as (task, told):
            await until(lambda: second.heard(Report) > 0)
            first.names()
            second.mute = True
            reports = first.heard(Report)
            await until(lambda: first.heard(Report) > reports + 20)
            said = len(second.said)
            await until(lambda: first.heard(Report) > reports + 40)
            assert len(second.said) == said, "it is not tried any more"
            assert not task.done()
            assert told[-1].conductors == [first.address]
        assert (first.heard(Leave), second.heard(Leave)) == (1, 0)


async def test_one_that_is_merely_unnamed_is_kept() -> None:
    async with councils(2) as (first, second):
        first.names(second)
        async with an_instance(first):
            await until(lambda: second.heard(Report) > 0)
            first.names()
            reports = second.heard(Report)
            await until(lambda: second.heard(Report) > reports + 20)
        assert second.heard(Register) == 1


async def test_a_refusal_of_any_conductor_ends_the_instance() -> None:
    async with councils(2) as (first, second):
        first.names(second)
        second.refuses = True
        async with an_instance(first) as (task, _):
            with pytest.raises(Superseded, match="newer"):
                await asyncio.wait_for(asyncio.shield(task), WITHIN_S)
