"""The seam between rpc and the network: frames go in at one end and come out at the other, or the link breaks.

Production hands in ZeroMQ (zmq_transport.py), a simulation its own network.
"""

from collections.abc import Sequence
from typing import Protocol

from protocol.frames import Buffer


class Link(Protocol):
    """The client's end of one connection."""

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Hand frames to the network; waits while there is no connection or its bounded queue is full.

        Raises PeerLost if the link is closed meanwhile.
        """
        ...

    async def receive(self) -> list[memoryview]:
        """The next frames from the server. Raises PeerLost when the connection breaks, once for each break."""
        ...

    def close(self) -> None:
        """Drop the connection and whatever is still queued."""
        ...


class Port(Protocol):
    """The server's end: one address, many peers."""

    address: str
    """Where it really listens: a wildcard port has become a number."""

    async def send(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Raises PeerLost if that peer is gone, or reads nothing."""
        ...

    async def receive(self) -> tuple[bytes, list[memoryview]]:
        """The next frames and who sent them."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class Transport(Protocol):
    """Makes links and ports."""

    def connect(self, address: str) -> Link:
        """Returns at once; the connection is made, and made again, behind the link. Raises BadAddress."""
        ...

    def bind(self, address: str) -> Port:
        """Listen at `address` (`tcp://127.0.0.1:0` for any free port, or `ipc://path`). Raises OSError."""
        ...
