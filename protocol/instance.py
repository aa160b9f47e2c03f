"""How an instance of any pool lives: it listens, registers, works, reports, and leaves."""

import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from protocol.cluster import Manifest
from protocol.ids import Incarnation, InstanceId
from protocol.memberships import Memberships
from protocol.message import Message
from protocol.registry import Heard, Load, Pool, Register
from protocol.rpc import Handler, Server
from protocol.tasks import together
from protocol.transport import Transport

EVERY_INTERFACE = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")
"""Good for a server that is known by name, not for one that tells its address."""


def new_incarnation() -> Incarnation:
    """A name for this life of a process, unlike any before it."""
    return Incarnation(uuid.uuid4().hex)


@dataclass(frozen=True)
class Role:
    """What an instance is in its cluster."""

    pool: Pool
    instance: str
    incarnation: Incarnation
    host: str
    manifest: Manifest
    directory: bool = False
    kind: str = ""
    """See Register."""

    def register(self, address: str) -> Register:
        """The message that says so."""
        return Register(
            InstanceId(self.instance),
            self.incarnation,
            self.pool,
            address,
            self.host,
            self.manifest,
            self.directory,
            self.kind,
        )


@dataclass(frozen=True)
class Work:
    """What an instance does: answer messages, run loops, tell its load, and hear of the cluster."""

    handlers: Mapping[type[Message], Handler]
    load: Callable[[], Load]
    heard: Callable[[Heard], Awaitable[None]]
    loops: Sequence[Callable[[str], Coroutine[Any, Any, None]]] = ()
    """Each is called with the address that the instance listens at, and runs until cancelled."""


async def run_instance(transport: Transport, role: Role, work: Work, *, listen: str, conductor: str) -> None:
    """Until cancelled. `conductor` may be several addresses with commas between. Raises OSError when it cannot
    listen, ValueError for addresses that are of no use, Mismatch or Superseded when it is unwelcome."""
    require_reachable(listen)
    conductors = addresses_in(conductor)
    server = Server(transport.bind(listen), work.handlers)

    def load() -> Load:
        told = work.load()
        return replace(told, bad_frames=server.bad_frames) if server.bad_frames else told

    memberships = Memberships(transport, conductors, role.register(server.address), load, work.heard)
    await together([server.serve(), *(loop(server.address) for loop in work.loops), memberships.run()])


def addresses_in(conductor: str) -> list[str]:
    """`a, b` as a list. Raises ValueError if it is empty."""
    addresses = [address.strip() for address in conductor.split(",") if address.strip()]
    if not addresses:
        raise ValueError("conductor must name at least one address")
    return addresses


def require_reachable(listen: str) -> None:
    """What an instance listens at is also what it is reached at: every interface is no address for others."""
    if listen.startswith(EVERY_INTERFACE):
        raise ValueError(f"listen is {listen}, and others could not connect to that: give this host's own address")
