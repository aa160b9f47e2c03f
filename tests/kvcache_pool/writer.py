"""A program that writes two blocks, but for their last layer, and waits for a line on its standard input before it
goes on and commits. It is given a directory's address, and how long its lease shall last."""

import asyncio
import sys
from dataclasses import replace

import numpy as np

from kvcache_pool.api import Directory, Priority
from kvcache_pool.transfer.mover import PoolMover
from protocol.errors import DangoError
from protocol.rpc import Client
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import HOST, LAYOUT, an_ask, names
from tests.kvcache_pool.soak_client import bytes_of

BLOCKS = names(1, 2)


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def main(address: str, lease_s: float) -> None:
    transport = ZmqTransport()
    mover = PoolMover(transport, HOST)
    async with Client(transport, address) as client:
        directory = Directory(client)
        lease = await directory.acquire(replace(an_ask(BLOCKS), lease_s=lease_s))
        mover.know(lease.places)

        async def write(layer: int) -> None:
            rows = np.stack([bytes_of(name)[layer] for name in BLOCKS])
            await mover.write(layer, lease.targets, rows, range(len(BLOCKS)), Priority.STORE)

        for layer in range(LAYOUT.layers - 1):
            await write(layer)
        say("reserved")
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await write(LAYOUT.layers - 1)
            await directory.commit(lease.lease, [0, 1], BLOCKS)
            say("committed")
        except DangoError as error:
            say(type(error).__name__)
    await mover.aclose()
    transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
