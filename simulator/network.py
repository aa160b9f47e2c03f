"""A network in memory: frames that are delayed, lost, doubled or cut off, between processes of one loop.

    Site a: Link ──frames──> Wire ──delay──> Port :Site b           each process is a Site; cutting one off
            Link <──frames── Wire <──delay── Port                   loses what it says and breaks its connections

What ZeroMQ promises holds here as well: frames of one connection arrive in order; a link connects again by
itself when somebody listens at its address; a break is told once.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocol.errors import PeerLost
from protocol.frames import Buffer
from protocol.inbox import Inbox

T = TypeVar("T")

BREAK_S = 5.0
"""How long a connection without a sign of life lasts: as ZeroMQ's heartbeats are set."""


@dataclass(frozen=True)
class Weather:
    """What happens to a message on its way. Probabilities are of each message."""

    delay_s: float = 50e-6
    """The least that a message takes."""
    jitter_s: float = 0.0
    """Uniformly so much more."""
    lost: float = 0.0
    doubled: float = 0.0

    @property
    def calm(self) -> bool:
        """Whether every message arrives once, after the same time."""
        return not (self.jitter_s or self.lost or self.doubled)


class Network:
    """All addresses. Owns the dice: one seed gives one course of events."""

    def __init__(self, weather: Weather, dice: random.Random) -> None:
        self.weather = weather
        self._dice = dice
        self._ports: dict[str, MemoryPort] = {}
        self._links: dict[str, list[MemoryLink]] = {}
        self._numbers = itertools.count(1)
        self.messages = 0
        """Sent since the start."""
        self.told: Callable[[str, str, Sequence[Buffer]], None] | None = None
        """Hears of each message that is sent: the sites from and to, and its frames."""
        self.stops: Callable[[str, str, Sequence[Buffer]], bool] | None = None
        """Says whether a message is lost, of the same."""

    def site(self, name: str) -> "Site":
        """A process of this network: a protocol.transport.Transport."""
        return Site(self, name)

    def copies(self) -> int:
        """How often the next message arrives."""
        if self._dice.random() < self.weather.lost:
            return 0
        return 2 if self._dice.random() < self.weather.doubled else 1

    def delay_s(self) -> float:
        """How long the next message takes."""
        jitter = self.weather.jitter_s
        return self.weather.delay_s + (self._dice.random() * jitter if jitter else 0.0)

    def number(self) -> int:
        """Never given before."""
        return next(self._numbers)

    def open(self, port: "MemoryPort") -> None:
        """Listen. Raises OSError if somebody does already."""
        if port.address in self._ports:
            raise OSError(f"{port.address} is in use")
        self._ports[port.address] = port
        self.meet(port.address)

    def shut(self, port: "MemoryPort") -> None:
        """Listen no more: every connection breaks."""
        if self._ports.get(port.address) is port:
            del self._ports[port.address]
        self.lose(port)

    def lose(self, port: "MemoryPort") -> None:
        """Every connection to a port breaks."""
        for link in list(self._links.get(port.address, ())):
            link.lose(port)

    def meet(self, address: str) -> None:
        """Those who look for `address` connect, if somebody listens there and neither is cut off."""
        port = self._ports.get(address)
        for link in self._links.get(address, ()):
            if port is not None and not link.connected and not (port.site.cut or link.site.cut):
                link.meet(port)

    def join(self, link: "MemoryLink") -> None:
        """A link looks for its address, now and whenever somebody listens there anew."""
        self._links.setdefault(link.address, []).append(link)
        self.meet(link.address)

    def leave(self, link: "MemoryLink") -> None:
        """The link is closed."""
        links = self._links.get(link.address, [])
        if link in links:
            links.remove(link)


class Site:
    """One process's view of the network. Implements protocol.transport.Transport."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.cut = False
        """Nothing goes in or out, and nobody is told: a partition."""
        self._ports: list[MemoryPort] = []
        self._links: list[MemoryLink] = []

    def connect(self, address: str) -> "MemoryLink":
        """See Transport."""
        link = MemoryLink(self, address)
        self._links.append(link)
        self.network.join(link)
        return link

    def bind(self, address: str) -> "MemoryPort":
        """See Transport. Port 0 becomes a number that nobody else has."""
        if address.endswith(":0"):
            address = f"{address[:-1]}{self.network.number()}"
        port = MemoryPort(self, address)
        self._ports.append(port)
        self.network.open(port)
        return port

    def sever(self) -> None:
        """A partition: nothing goes in or out, and nobody is told before `BREAK_S` is over."""
        self.cut = True
        asyncio.get_running_loop().call_later(BREAK_S, self._break)

    def _break(self) -> None:
        if self.cut:
            for port in self._ports:
                self.network.lose(port)
            for link in list(self._links):
                link.lose()

    def heal(self) -> None:
        """The partition is over; who lost a connection makes it again."""
        self.cut = False
        for address in [*(port.address for port in self._ports), *(link.address for link in self._links)]:
            self.network.meet(address)

    def die(self) -> None:
        """The process is gone: every connection of it breaks at once, and what it still says is not heard."""
        self.cut = True
        for port in list(self._ports):
            port.close()
        for link in list(self._links):
            link.close()

    def tell(self, to: "Site", frames: Sequence[Buffer]) -> bool:
        """A message leaves for another site. False: it is lost on its way, whatever the weather."""
        if self.network.told is not None:
            self.network.told(self.name, to.name, frames)
        return self.network.stops is None or not self.network.stops(self.name, to.name, frames)

    def forget(self, link: "MemoryLink") -> None:
        """The link has been closed."""
        if link in self._links:
            self._links.remove(link)

    def close(self) -> None:
        """As ZmqTransport: the process ends."""
        self.die()


Received = tuple[bytes, list[memoryview]]
"""What comes to a port: from which peer, and its frames."""


class _Wire(Generic[T]):
    """One direction of one connection: what goes in comes out later, in order."""

    def __init__(self, network: Network, inbox: Inbox[T]) -> None:
        self._network = network
        self._inbox = inbox
        self._under_way: deque[T] = deque()
        self._last = 0.0
        self.broken = False

    def send(self, item: T) -> None:
        """Hand something to the network."""
        network = self._network
        network.messages += 1
        loop = asyncio.get_running_loop()
        if network.weather.calm:
            self._under_way.append(item)
            loop.call_later(network.weather.delay_s, self._arrive)
            return
        for _ in range(network.copies()):
            self._under_way.append(item)
            self._last = max(self._last, loop.time() + network.delay_s())
            loop.call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        item = self._under_way.popleft()
        if not self.broken:
            self._inbox.put(item)


class MemoryLink:
    """Implements protocol.transport.Link."""

    def __init__(self, site: Site, address: str) -> None:
        self.address = address
        self.site = site
        self.inbox: Inbox[list[memoryview] | PeerLost] = Inbox()
        """Where answers and breaks go."""
        self._port: MemoryPort | None = None
        self._peer = b""
        self._out: _Wire[Received] | None = None
        self._met = asyncio.Event()
        self._closed = False

    def meet(self, port: "MemoryPort") -> None:
        """Somebody listens at our address."""
        self._port, self._peer = port, b"%d" % self.site.network.number()
        self._out = port.admit(self._peer, self)
        self._met.set()

    @property
    def connected(self) -> bool:
        """Whether somebody hears what is sent."""
        return self._port is not None

    def lose(self, port: "MemoryPort | None" = None) -> None:
        """The connection breaks (if it is to this port)."""
        if self._port is not None and port in (None, self._port):
            self._part()
            self.inbox.put(PeerLost(f"the connection to {self.address} broke"))

    def _part(self) -> None:
        if self._port is not None:
            self._port.dismiss(self._peer)
        if self._out is not None:
            self._out.broken = True
        self._port = self._out = None
        self._met.clear()

    async def send(self, frames: Sequence[Buffer]) -> None:
        """See Link."""
        while self._out is None:
            if self._closed:
                raise PeerLost(f"the link to {self.address} is closed")
            await self._met.wait()
        assert self._port is not None
        if not (self.site.cut or self._port.site.cut) and self.site.tell(self._port.site, frames):
            self._out.send((self._peer, [memoryview(frame) for frame in frames]))

    async def receive(self) -> list[memoryview]:
        """See Link."""
        came = await self.inbox.get()
        if isinstance(came, PeerLost):
            raise came
        return came

    def close(self) -> None:
        """See Link."""
        if not self._closed:
            self._closed = True
            self._part()
            self._met.set()
            self.site.network.leave(self)
            self.site.forget(self)


class MemoryPort:
    """Implements protocol.transport.Port."""

    def __init__(self, site: Site, address: str) -> None:
        self.address = address
        self.site = site
        self._inbox: Inbox[Received] = Inbox()
        self._peers: dict[bytes, tuple[_Wire[list[memoryview] | PeerLost], Site]] = {}

    def admit(self, peer: bytes, link: MemoryLink) -> _Wire[Received]:
        """A link connects; returns the wire to us."""
        self._peers[peer] = (_Wire(self.site.network, link.inbox), link.site)
        return _Wire(self.site.network, self._inbox)

    def dismiss(self, peer: bytes) -> None:
        """Its link is gone."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known[0].broken = True

    async def send(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """See Port."""
        known = self._peers.get(peer)
        if known is None:
            raise PeerLost(f"{peer!r} is gone")
        wire, site = known
        if not (self.site.cut or site.cut) and self.site.tell(site, frames):
            wire.send([memoryview(frame) for frame in frames])

    async def receive(self) -> tuple[bytes, list[memoryview]]:
        """See Port."""
        return await self._inbox.get()

    def close(self) -> None:
        """See Port."""
        self.site.network.shut(self)
