"""The network in memory keeps ZeroMQ's promises: order, breaks told once, links that find their address again."""

import asyncio
import random

import pytest

from protocol.errors import DeadlineExceeded, PeerLost
from protocol.message import Message
from protocol.rpc import Ask, Client, Server, handler
from simulator.loop import run_virtual
from simulator.network import BREAK_S, MemoryLink, Network, Site, Weather

ADDRESS = "sim://there:1"


class Ping(Message):
    number: int


def a_network(**weather: float) -> Network:
    return Network(Weather(**weather), random.Random(1))


async def _echo(message: Ping, ask: Ask) -> Ping:
    return message


def a_server(site: Site) -> asyncio.Task[None]:
    return asyncio.create_task(Server(site.bind(ADDRESS), dict([handler(Ping, _echo)])).serve())


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_call_takes_two_delays():
    async def main() -> None:
        network = a_network(delay_s=0.5)
        server = a_server(network.site("there"))
        async with Client(network.site("here"), ADDRESS) as client:
            assert await client.call(Ping(7), Ping, within_s=10.0) == Ping(7)
            assert asyncio.get_running_loop().time() == pytest.approx(1.0)
        await _end(server)

    run_virtual(main())


def test_frames_of_one_connection_arrive_in_order_however_long_each_takes():
    async def main() -> list[bytes]:
        network = a_network(jitter_s=1.0)
        port = network.site("there").bind(ADDRESS)
        link = network.site("here").connect(ADDRESS)
        for number in range(100):
            await link.send([b"%d" % number])
        return [bytes((await port.receive())[1][0]) for _ in range(100)]

    assert run_virtual(main()) == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize(("weather", "arrive"), [({"lost": 1.0}, 0), ({"doubled": 1.0}, 2)])
def test_messages_are_lost_and_doubled(weather: dict[str, float], arrive: int):
    async def main() -> int:
        network = a_network(**weather)
        port = network.site("there").bind(ADDRESS)
        await network.site("here").connect(ADDRESS).send([b"x"])
        count = 0
        while True:
            try:
                async with asyncio.timeout(1.0):
                    await port.receive()
            except TimeoutError:
                return count
            count += 1

    assert run_virtual(main()) == arrive


def test_chosen_messages_are_lost_in_either_direction():
    async def main() -> list[bytes]:
        network = a_network()
        network.stops = lambda origin, to, frames: (origin, bytes(frames[0])) in {("here", b"x"), ("there", b"y")}
        port, link = network.site("there").bind(ADDRESS), network.site("here").connect(ADDRESS)
        await link.send([b"x"])
        await link.send([b"y"])
        peer, (frame,) = await port.receive()
        await port.send(peer, [b"y"])
        await port.send(peer, [b"x"])
        return [bytes(frame), *map(bytes, await link.receive())]

    assert run_virtual(main()) == [b"y", b"x"]


def test_a_death_fails_open_calls_at_once_and_a_new_life_is_found_by_itself():
    async def main() -> None:
        network = a_network()
        there = network.site("there")
        server = a_server(there)
        async with Client(network.site("here"), ADDRESS) as client:
            await client.call(Ping(1), Ping, within_s=1.0)
            there.die()
            await _end(server)
            with pytest.raises(PeerLost):
                await client.call(Ping(2), Ping, within_s=60.0)
            server = a_server(network.site("there"))
            assert await client.call(Ping(3), Ping, within_s=1.0) == Ping(3)
        await _end(server)

    run_virtual(main())


def test_a_partition_is_silence_then_a_break_and_heals():
    async def main() -> None:
        network = a_network()
        there = network.site("there")
        server = a_server(there)
        async with Client(network.site("here"), ADDRESS) as client:
            await client.call(Ping(1), Ping, within_s=1.0)
            there.sever()
            with pytest.raises(DeadlineExceeded):
                await client.call(Ping(2), Ping, within_s=BREAK_S / 2)
            began = asyncio.get_running_loop().time()
            with pytest.raises(PeerLost):
                await client.call(Ping(2), Ping, within_s=BREAK_S)
            assert asyncio.get_running_loop().time() - began == pytest.approx(BREAK_S / 2)
            there.heal()
            assert await client.call(Ping(3), Ping, within_s=1.0) == Ping(3)
        await _end(server)

    run_virtual(main())


def test_a_link_to_nobody_waits_and_a_closed_one_says_so():
    async def main() -> None:
        network = a_network()
        link: MemoryLink = network.site("here").connect(ADDRESS)
        sending = asyncio.create_task(link.send([b"x"]))
        await asyncio.sleep(1.0)
        assert not sending.done()
        port = network.site("there").bind(ADDRESS)
        await sending
        peer, frames = await port.receive()
        await port.send(peer, [b"y", bytes(frames[0])])
        assert [bytes(frame) for frame in await link.receive()] == [b"y", b"x"]
        link.close()
        with pytest.raises(PeerLost):
            await link.send([b"z"])
        with pytest.raises(PeerLost):
            await port.send(peer, [b"z"])
        with pytest.raises(OSError, match="in use"):
            network.site("elsewhere").bind(ADDRESS)

    run_virtual(main())
