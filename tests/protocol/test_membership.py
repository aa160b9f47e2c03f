"""An instance's place in the registry while the Conductor comes and goes."""

import asyncio
import logging
import random
from typing import Any

import pytest

from protocol.errors import DeadlineExceeded, PeerLost
from protocol.ids import Incarnation, InstanceId
from protocol.membership import Member
from protocol.message import Message
from protocol.registry import DEAD_AFTER_REPORTS, Heard, Load, Pool, Register, Report, Welcome
from protocol.rpc import Client
from protocol.zmq_transport import ZmqTransport
from simulator.loop import run_virtual
from simulator.network import Network, Weather
from tests.fakes import MANIFEST


class Uncertain(Client):
    """Answers registrations as the script says, True for a Welcome; everything else is lost."""

    script: list[bool]
    over: asyncio.Event

    async def call(self, message: Message, *_: Any, **__: Any) -> Any:
        if isinstance(message, Register):
            if not self.script:
                self.over.set()
            elif self.script.pop(0):
                return Welcome(Heard(True, None))
        raise PeerLost("gone")


async def warnings_of(script: list[bool], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a member warns of until the script is over and it is told to end."""

    async def heard(_: Heard) -> None:
        return None

    identity = Register(InstanceId("decode-0"), Incarnation("one"), Pool.DECODE, "ipc://x", "here", MANIFEST)
    transport = ZmqTransport()
    try:
        client = Uncertain(transport, "ipc:///nowhere")
        client.script, client.over = script, asyncio.Event()
        task = asyncio.create_task(Member(client, identity, Load, heard).run())
        await client.over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    finally:
        transport.close()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_ordinary_stop_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The Conductor ends first, so a report may be lost, and the farewell is."""
    with caplog.at_level(logging.DEBUG):
        assert await warnings_of([], caplog) == []
    assert "left without a farewell: gone" in caplog.messages


async def test_a_conductor_that_stays_away_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert await warnings_of([False], caplog) == ["the conductor does not answer: gone"]


async def test_an_answer_between_two_failures_forgives_the_first(caplog: pytest.LogCaptureFixture) -> None:
    assert await warnings_of([False, True], caplog) == ["the conductor does not answer: gone"]


class Lossy(Client):
    """Loses the first report: nothing comes back before its deadline."""

    said: list[tuple[str, float]]

    async def call(self, message: Message, *_: Any, within_s: float) -> Any:
        now = asyncio.get_running_loop().time()
        self.said.append((type(message).__name__, now))
        if isinstance(message, Register):
            return Welcome(Heard(True, None, report_s=0.5))
        if len(self.said) == 2:
            await asyncio.sleep(within_s)
            raise DeadlineExceeded("nothing came")
        return Heard(True, None, report_s=0.5)


def test_one_lost_report_is_made_good_before_silence_counts_as_death() -> None:
    async def heard(_: Heard) -> None:
        return None

    async def main() -> list[tuple[str, float]]:
        identity = Register(InstanceId("decode-0"), Incarnation("one"), Pool.DECODE, "sim://x", "here", MANIFEST)
        client = Lossy(Network(Weather(), random.Random(1)).site("here"), "sim://conductor")
        client.said = []
        task = asyncio.create_task(Member(client, identity, Load, heard).run())
        await asyncio.sleep(10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return client.said

    said = run_virtual(main())
    assert [name for name, _ in said[:4]] == ["Register", "Report", "Register", "Report"]
    assert said[2][1] - said[0][1] < DEAD_AFTER_REPORTS * 0.5


class Willing(Client):
    """Answers everything, and remembers what was said."""

    said: list[Message]
    reported: asyncio.Event

    async def call(self, message: Message, *_: Any, **__: Any) -> Any:
        self.said.append(message)
        if isinstance(message, Register):
            return Welcome(Heard(True, None))
        if isinstance(message, Report):
            self.reported.set()
        return Heard(True, None)


async def test_the_first_report_follows_the_registration_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how fast the instance is: the Conductor should know before it places anything there."""
    monkeypatch.setattr("protocol.membership.REPORT_EVERY_S", 3600.0)

    async def heard(_: Heard) -> None:
        return None

    identity = Register(InstanceId("decode-0"), Incarnation("one"), Pool.DECODE, "ipc://x", "here", MANIFEST)
    transport = ZmqTransport()
    try:
        client = Willing(transport, "ipc:///nowhere")
        client.said, client.reported = [], asyncio.Event()
        task = asyncio.create_task(Member(client, identity, Load, heard).run())
        async with asyncio.timeout(10):
            await client.reported.wait()
        assert [type(message) for message in client.said] == [Register, Report]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    finally:
        transport.close()
