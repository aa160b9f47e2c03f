"""Following the directory: concurrent news, one connection."""

import asyncio

import pytest

from kvcache_pool.api import DirectoryLink
from protocol.errors import PeerLost
from protocol.zmq_transport import ZmqTransport


async def test_those_who_follow_at_the_same_time_leave_one_connection_and_the_last_address():
    before = asyncio.all_tasks()
    transport = ZmqTransport()
    link = DirectoryLink(transport)
    await link.follow("tcp://127.0.0.1:1")
    await asyncio.sleep(0.05)
    tasks_of_one = len(asyncio.all_tasks() - before)
    await asyncio.gather(*(link.follow(f"tcp://127.0.0.1:{port}") for port in (2, 2, 3, 3, 4)))
    assert link.address == "tcp://127.0.0.1:4"
    await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks() - before) == tasks_of_one
    await link.follow(None)
    with pytest.raises(PeerLost):
        link.get()
    await asyncio.gather(link.follow("tcp://127.0.0.1:5"), link.aclose())
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before
    transport.close()
