"""Mooncake's Transfer Engine, as much of it as moves KV: reads of another process's registered memory.

An optional package. It speaks tcp or, where there are such cards, rdma; what is said here holds for both. Who
reads tells the engine an address of the other process, and nobody there takes part. What shapes our use of it:

- A transfer that was begun cannot be taken back. So bytes land in memory of this file's, never in a caller's; a
  buffer is used again when the engine says that all its transfers have ended.
- Its own blocking calls spin on a core until the end, on which the engine's thread would rather run. So each piece
  is a transfer of its own, begun at once and looked after with naps.
- Whoever reaches its ports may read and write what is registered, without a word of ours. So tables of generations
  and checksums are never registered: what lies in registered memory proves nothing.
"""

import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcache_pool.api import Priority
from kvcache_pool.segment import Bytes
from kvcache_pool.transfer.copiers import HOP_BYTES, Turns

GIVE_UP_S = 5.0
"""For all pieces of a hop, some milliseconds where all is well: then another way still has time."""

NAP_S, NAP_S_MAX = 50e-6, 400e-6
"""Between two looks at a transfer: the first, and twice as long each time up to the second."""

RDMA_DEVICES = Path("/sys/class/infiniband")

ENVIRONMENT = {
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
}
"""Unless the user has set them: tell errors only; keep connections; give up on nobody after 2 s."""

ENDED, FAILED = 1, -1
"""What the engine says of a transfer that it has forgotten after this. Anything else: it may still write."""


@dataclass(frozen=True)
class MooncakeSettings:
    """How the engine is to be used."""

    protocol: str = "tcp"
    """tcp or rdma."""
    devices: str = ""
    """Names of network cards, with commas between; empty takes all there are."""

    def require(self) -> type[Any]:
        """The engine's class. Raises ValueError that says what to install, or what this machine does not have."""
        if self.protocol == "rdma" and not (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())):
            raise ValueError(f"there is no RDMA device in {RDMA_DEVICES}: take tcp as Mooncake's protocol")
        try:
            with _environment(self):
                from mooncake.engine import TransferEngine as Found
        except ImportError as error:
            raise ValueError(
                f"Mooncake's Transfer Engine cannot be loaded ({error}): pip install 'dango-serve[mooncake]', "
                "and on Debian apt-get install libibverbs1 librdmacm1"
            ) from error
        found: type[Any] = Found
        return found

    def is_here(self) -> bool:
        """Whether all that it needs is installed."""
        try:
            self.require()
        except ValueError:
            return False
        return True


class Buffer:
    """Registered memory for one hop."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self.bytes: Bytes = np.frombuffer(self._memory, np.uint8)
        self.address: int = self.bytes.ctypes.data
        self.under_way: list[int] = []
        """Transfers that may still write here."""


class TransferEngine:
    """One engine. Owns its two ports, its threads, and what is registered, until `close`."""

    def __init__(self, host: str, settings: MooncakeSettings) -> None:
        """Others reach it at `host`, an IPv4 address or a name. Raises ValueError, OSError."""
        if ":" in host:
            raise OSError(f"Mooncake's engine is not asked to listen at {host}: only IPv4 was tried")
        engine_class = settings.require()
        with _environment(settings):
            self._engine = engine_class()
            if code := self._engine.initialize(host, "P2PHANDSHAKE", settings.protocol, settings.devices):
                raise OSError(f"Mooncake's engine does not start ({code}); what it wrote to stderr says why")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        """What others call it by."""

    def register(self, address: int, size: int) -> None:
        """Others may read this memory now, which must stay until `close`. Raises OSError."""
        if code := self._engine.register_memory(address, size):
            raise OSError(f"{size} bytes cannot be registered with Mooncake's engine ({code})")

    def fetch(
        self, session: str, pieces: Sequence[tuple[int, int]], buffer: Buffer, stop: threading.Event
    ) -> bool:
        """Read (address, bytes) of another process into the buffer, one after another. In a thread.

        False if some could not be read, in GIVE_UP_S or until `stop` is set. The first time, the engine may take
        2 s to find that nobody is at `session`, and 60 s if whoever is there has stopped in that moment.
        """
        ends, to = time.monotonic() + GIVE_UP_S, buffer.address
        for address, size in pieces:
            number = self._engine.batch_transfer_async_read(session, [to], [address], [size])
            if not number:
                return False
            buffer.under_way.append(number)
            to += size
        nap = NAP_S
        while not stop.is_set() and time.monotonic() < ends:
            if not self.looked_after(buffer):
                return False
            if not buffer.under_way:
                return True
            time.sleep(nap)
            nap = min(2 * nap, NAP_S_MAX)
        return False

    def looked_after(self, buffer: Buffer) -> bool:
        """Forget the buffer's transfers that have ended. Whether none of them failed."""
        states = {number: self._engine.transfer_check_status(number) for number in buffer.under_way}
        buffer.under_way = [number for number, state in states.items() if state not in (ENDED, FAILED)]
        return min(states.values(), default=0) >= 0

    def close(self) -> None:
        """End its threads: nothing is written any more. Nobody may be in `fetch`. Twice is no error."""
        self._engine = None


class Buffers:
    """Some buffers of one engine. Owns them; they must outlive it."""

    def __init__(self, engine: TransferEngine, count: int, block_bytes: int) -> None:
        """Each holds a hop of such blocks. Raises OSError."""
        self.engine = engine
        self._turns = Turns(count)
        self._idle = [Buffer(max(HOP_BYTES, block_bytes)) for _ in range(count)]
        for buffer in self._idle:
            engine.register(buffer.address, buffer.bytes.nbytes)

    @asynccontextmanager
    async def one(self, priority: Priority) -> AsyncIterator[Buffer | None]:
        """A buffer for a while; None where others' transfers into all that are left have been given up, and have
        not ended."""
        async with self._turns.turn(priority):
            for buffer in self._idle:
                self.engine.looked_after(buffer)
            found = next((buffer for buffer in self._idle if not buffer.under_way), None)
            if found is None:
                yield None
                return
            self._idle.remove(found)
            try:
                yield found
            finally:
                self._idle.append(found)


@contextmanager
def _environment(settings: MooncakeSettings) -> Iterator[None]:
    """The engine takes most of its settings from the environment, when it is loaded and when it starts; what it
    finds there is taken away again. With rdma cards it takes rdma, unless it is told to take tcp."""
    wanted = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if settings.protocol == "tcp":
        wanted["MC_FORCE_TCP"] = "1"
    before = {name: os.environ.get(name) for name in (*wanted, "MC_FORCE_TCP")}
    if settings.protocol != "tcp":
        os.environ.pop("MC_FORCE_TCP", None)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
