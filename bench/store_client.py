"""A client in a process of its own: gets objects of 1.1 MB through shared memory, for as long as it is told.

`python -m bench.store_client ADDRESS SECONDS` says `ready`, waits for a line, and tells at the end how many gets
there were.
"""

import asyncio
import sys
import time

from bench.objects import OBJECTS, SMOLLM, Objects
from bench.pool import Pool
from bench.store import CLIENT_SLOTS
from kvcache_pool.transfer.mover import Reach
from protocol.process import run_process
from protocol.rpc import Client
from protocol.zmq_transport import ZmqTransport


async def _run(address: str, seconds: float) -> None:
    transport = ZmqTransport()
    try:
        async with Client(transport, address) as client:
            pool = Pool(transport, client)
            lease = await pool.lease([], unnamed=CLIENT_SLOTS)
            objects = Objects(pool, SMOLLM, lease.targets)
            try:
                objects.movers[Reach.SHM].know(lease.places)
                put, get = objects.put(Reach.SHM, OBJECTS["11.8 MB"]), objects.get(Reach.SHM, OBJECTS["1.1 MB"])
                for number in range(CLIENT_SLOTS // OBJECTS["11.8 MB"]):
                    await put(number)
                for number in range(CLIENT_SLOTS // OBJECTS["1.1 MB"]):
                    await get(number)
                print("ready", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                gets, end = 0, time.perf_counter() + seconds
                while time.perf_counter() < end:
                    await get(gets)
                    gets += 1
                print(gets, flush=True)
            finally:
                await objects.aclose()
                await pool.directory.release(lease.lease)
    finally:
        transport.close()


if __name__ == "__main__":
    run_process(_run(sys.argv[1], float(sys.argv[2])))
