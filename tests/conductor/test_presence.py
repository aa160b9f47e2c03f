"""Conductors and a real Redis: they find each other through it, and lose nothing by its absence."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace

import pytest

from conductor.estimate import Estimates
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.presence import CONDUCTOR, ENDED, INSTANCE, MANIFEST_KEY, REDIS_S, Presence, expiry_s
from conductor.registry import Registry
from conductor.roster import Roster
from conductor.view import View
from kvcache_pool.api import DirectoryLink
from protocol.cluster import Manifest, Mismatch
from protocol.ids import Incarnation, InstanceId
from protocol.registry import Heard, Load, Pool, Register, Report, Superseded
from protocol.rpc import Ask
from protocol.zmq_transport import ZmqTransport
from tests.fakes import MANIFEST
from tests.redis_server import RedisServer, a_redis_server

REPORT_S = 0.1
RETURN_S = 10.0
"""What is promised: so soon after Redis' return all is as it was."""

A, B = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
ASK = Ask([], 5.0, send=None)  # type: ignore[arg-type]
OTHER = replace(MANIFEST, layout=replace(MANIFEST.layout, block_tokens=32))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    yield from a_redis_server()


@dataclass
class Place:
    """A Conductor without its HTTP edge."""

    view: View
    registry: Registry
    roster: Roster
    presence: Presence
    task: "asyncio.Task[None] | None" = None

    async def hear_of(
        self, name: str, incarnation: str, pool: Pool = Pool.DECODE, directory: bool = False
    ) -> None:
        """An instance registers."""
        identity = (InstanceId(name), Incarnation(incarnation), pool, f"tcp://127.0.0.1:{len(name)}", "here")
        await self.registry.register(Register(*identity, self.view.manifest, directory), ASK)

    def report(self, name: str, incarnation: str) -> Heard:
        return self.registry.report(Report(InstanceId(name), Incarnation(incarnation), Load()))

    def names(self) -> list[str]:
        return [instance.name for pool in Pool for instance in self.view.of(pool)]


@asynccontextmanager
async def a_conductor(url: str, address: str = A, manifest: Manifest = MANIFEST) -> AsyncIterator[Place]:
    """Opened, and in step with Redis until the end."""
    transport = ZmqTransport()
    view, roster = View(manifest, REPORT_S), Roster(address, expiry_s(REPORT_S))
    directory = DirectoryLink(transport)
    registry = Registry(view, Peers(transport), directory, Metrics("fake"), Estimates(), roster)
    presence = Presence(url, address, view, registry, roster)
    place = Place(view, registry, roster, presence)
    try:
        await presence.open()
        place.task = asyncio.create_task(presence.run())
        yield place
        view.check()
    finally:
        if place.task is not None:
            place.task.cancel()
            await asyncio.gather(place.task, return_exceptions=True)
        await presence.aclose()
        await directory.aclose()
        transport.close()


async def until(seen: Callable[[], object], within_s: float = RETURN_S) -> None:
    async with asyncio.timeout(within_s):
        while not seen():  # noqa: ASYNC110 - a test may poll
            await asyncio.sleep(0.02)


async def test_two_conductors_name_each_other_and_one_that_ends_is_named_no_more(server: RedisServer) -> None:
    async with a_conductor(server.unix_url, A) as first:
        async with a_conductor(server.url, B) as second:
            await until(lambda: first.roster.conductors == second.roster.conductors == [A, B], 2.0)
            await first.hear_of("decode-0", "one")
            assert first.report("decode-0", "one").conductors == [A, B]
            assert second.report("decode-0", "one") == Heard(False, None, None, REPORT_S, [A, B])
        await until(lambda: first.roster.conductors == [A], 2.0)


async def test_one_that_dies_without_a_word_expires(server: RedisServer) -> None:
    async with a_conductor(server.url, A) as first, a_conductor(server.url, B) as second:
        await until(lambda: first.roster.conductors == [A, B], 2.0)
        assert second.task is not None
        second.task.cancel()
        await until(lambda: first.roster.conductors == [A], expiry_s(REPORT_S) + 1)


async def test_a_conductor_that_starts_knows_the_pool_at_once(server: RedisServer) -> None:
    async with a_conductor(server.url, A) as first:
        await first.hear_of("kvcache-0", "k", Pool.KVCACHE, directory=True)
        await first.hear_of("decode-0", "one")
        with closing(server.client()) as client:
            await until(lambda: client.exists(INSTANCE + "decode-0", INSTANCE + "kvcache-0") == 2)
            assert 0 < client.pttl(INSTANCE + "decode-0") <= expiry_s(REPORT_S) * 1000
            assert json.loads(client.get(INSTANCE + "decode-0"))["incarnation"] == "one"
        async with a_conductor(server.url, B) as second:
            assert second.names() == ["kvcache-0", "decode-0"]
            assert second.view.directory == first.view.directory
            assert second.report("decode-0", "one").known


async def test_a_newer_life_replaces_the_older_at_every_conductor(server: RedisServer) -> None:
    """B49: also at one that starts later, and never heard of the older."""
    async with a_conductor(server.url, A) as first, a_conductor(server.url, B) as second:
        for place in (first, second):
            await place.hear_of("decode-0", "one")
        await first.hear_of("decode-0", "two")
        await until(lambda: not second.report("decode-0", "one").known, 2.0)
        with pytest.raises(Superseded):
            await second.hear_of("decode-0", "one")
        await second.hear_of("decode-0", "two")
        with closing(server.client()) as client:
            await until(lambda: json.loads(client.get(INSTANCE + "decode-0"))["incarnation"] == "two", 2.0)
            await asyncio.sleep(2 * REPORT_S)  # an older entry of the second may have been under way
        async with a_conductor(server.url, "tcp://127.0.0.1:3") as third:
            assert third.report("decode-0", "two").known
            with pytest.raises(Superseded):
                await third.hear_of("decode-0", "one")
        with closing(server.client()) as client:
            assert client.lrange(ENDED, 0, -1) == ["one"]


async def test_another_manifest_is_refused_at_the_start_and_changes_nothing(server: RedisServer) -> None:
    async with a_conductor(server.url, A) as first:
        with pytest.raises(Mismatch, match="block_tokens is 32, but this cluster has 4"):
            async with a_conductor(server.url, B, OTHER):
                pass
        await until(lambda: first.roster.conductors == [A], 2.0)
        with closing(server.client()) as client:
            assert not client.exists(CONDUCTOR + B)


async def test_the_cluster_is_free_for_another_manifest_once_its_conductors_are_gone(server: RedisServer) -> None:
    async with a_conductor(server.url, A):
        pass
    await asyncio.sleep(expiry_s(REPORT_S) + 0.1)
    async with a_conductor(server.url, A, OTHER) as place:
        assert place.registry.degraded == []


async def test_another_manifest_in_a_redis_that_returns_is_told_and_kept_out_of(server: RedisServer) -> None:
    async with a_conductor(server.url, A) as first:
        await first.hear_of("decode-0", "one")
        assert first.task is not None
        first.task.cancel()
        server.kill()
        server.start()
        async with a_conductor(server.url, B, OTHER) as second:
            first.task = asyncio.create_task(first.presence.run())
            told = "another cluster: block_tokens is 4, but this cluster has 32"
            await until(lambda: told in "".join(first.registry.degraded))
            await asyncio.sleep(3 * REPORT_S)
            assert (first.names(), second.names()) == (["decode-0"], [])
            assert (first.roster.conductors, second.roster.conductors) == ([A], [B])
            assert second.registry.degraded == []


async def test_redis_killed_and_back_empty(server: RedisServer) -> None:
    """B48: what was known stays, all that time, and soon is in Redis again; newcomers are found."""
    async with a_conductor(server.url, A) as first, a_conductor(server.url, B) as second:
        await until(lambda: first.roster.conductors == second.roster.conductors == [A, B], 2.0)
        await first.hear_of("decode-0", "one")
        server.kill()
        await until(lambda: first.registry.degraded and second.registry.degraded)
        assert "Redis cannot be used" in first.registry.degraded[0]
        await asyncio.sleep(expiry_s(REPORT_S))
        await first.hear_of("decode-1", "one")
        assert first.report("decode-0", "one").conductors == [A, B] == second.roster.conductors
        server.start()
        await until(lambda: not first.registry.degraded and not second.registry.degraded)
        with closing(server.client()) as client:
            await until(
                lambda: client.exists(INSTANCE + "decode-1", CONDUCTOR + A, CONDUCTOR + B, MANIFEST_KEY) == 4
            )
        assert first.roster.conductors == second.roster.conductors == [A, B]
        async with a_conductor(server.url, "tcp://127.0.0.1:3"):
            await until(lambda: len(first.roster.conductors) == len(second.roster.conductors) == 3)


async def test_redis_that_hangs(server: RedisServer) -> None:
    """B48: it accepts and never answers. Every exchange ends in time, and the loop goes on meanwhile."""
    async with a_conductor(server.url, A) as first, a_conductor(server.unix_url, B) as second:
        await until(lambda: first.roster.conductors == second.roster.conductors == [A, B], 2.0)
        server.freeze()
        await until(lambda: first.registry.degraded and second.registry.degraded, 4 * REDIS_S)
        longest, since = 0.0, asyncio.get_running_loop().time()
        while longest < 1.0 and asyncio.get_running_loop().time() - since < 3 * REDIS_S:
            before = asyncio.get_running_loop().time()
            assert first.roster.conductors == [A, B]
            await asyncio.sleep(0.01)
            longest = max(longest, asyncio.get_running_loop().time() - before)
        assert longest < 1.0, "nobody else waits for Redis"
        server.thaw()
        await until(lambda: not first.registry.degraded and not second.registry.degraded)
        assert first.roster.conductors == second.roster.conductors == [A, B]


async def test_a_start_while_redis_is_away_or_hangs(server: RedisServer) -> None:
    server.freeze()
    began = asyncio.get_running_loop().time()
    async with a_conductor(server.url, A) as first:
        assert asyncio.get_running_loop().time() - began < REDIS_S + 1.0
        assert "did not answer within" in first.registry.degraded[0]
        assert first.roster.conductors == [A]
        server.kill()
        async with a_conductor(server.url, B) as second:
            assert second.registry.degraded
            server.start()
            await until(lambda: first.roster.conductors == second.roster.conductors == [A, B])
            assert first.registry.degraded == second.registry.degraded == []


@pytest.mark.parametrize(
    ("key", "text"), [(MANIFEST_KEY, "{"), (MANIFEST_KEY, '{"model": "x"}'), ("dango:conductors", "x")]
)
async def test_nonsense_in_redis_is_a_fault_of_redis(server: RedisServer, key: str, text: str) -> None:
    """Somebody else uses the database. It is told, and mended as soon as that is gone."""
    with closing(server.client()) as client:
        client.set(key, text)
        async with a_conductor(server.url, A) as place:
            assert "Redis cannot be used" in place.registry.degraded[0]
            client.delete(key)
            await until(lambda: not place.registry.degraded)


async def test_something_else_at_the_port_is_a_fault_that_holds_no_password(server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://user:open-sesame@127.0.0.1:{listener.getsockname()[1]}/0"
        async with a_conductor(url, A) as place:
            assert place.registry.degraded
            assert "sesame" not in place.registry.degraded[0]
    refused = server.url.replace("redis://", "redis://user:open-sesame@")
    async with a_conductor(refused, A) as place:
        assert "Redis cannot be used" in place.registry.degraded[0]
        assert "sesame" not in place.registry.degraded[0]
