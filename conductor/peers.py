"""The Conductor's connections to instances: one a life of each."""

from conductor.view import Instance
from protocol.ids import Incarnation
from protocol.rpc import Client
from protocol.transport import Transport


class Peers:
    """Clients by incarnation. A client of an instance that died is closed, which fails its open calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._clients: dict[Incarnation, Client] = {}

    @property
    def known(self) -> list[Incarnation]:
        """Whom a connection is kept for."""
        return list(self._clients)

    def of(self, instance: Instance) -> Client:
        """The connection to a living instance, made at first use."""
        client = self._clients.get(instance.incarnation)
        if client is None:
            client = self._clients[instance.incarnation] = Client(self._transport, instance.address).start()
        return client

    async def drop(self, instance: Instance) -> None:
        """The instance is no more: its open calls fail with PeerLost now, not at their deadline."""
        client = self._clients.pop(instance.incarnation, None)
        if client is not None:
            await client.aclose()

    async def aclose(self) -> None:
        """Close all."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()
