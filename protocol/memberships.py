"""An instance's memberships: registered with every Conductor of its cluster, and reporting to each."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from protocol.hearsay import Hearsay
from protocol.membership import Member
from protocol.registry import TIMINGS_MAX, Heard, Load, Register, Timing
from protocol.rpc import Client
from protocol.transport import Transport


class Memberships:
    """One Member for each Conductor that is configured or heard of. Owns their tasks and connections.

    `load` is asked at each report, `heard` is awaited with what all Conductors say together.
    """

    def __init__(
        self,
        transport: Transport,
        conductors: Sequence[str],
        identity: Register,
        load: Callable[[], Load],
        heard: Callable[[Heard], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._load = load
        self._heard = heard
        self._hearsay = Hearsay(conductors)
        self._members: dict[str, asyncio.Task[None]] = {}
        self._untold: dict[str, deque[Timing]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled. Raises Mismatch or Superseded when a Conductor will not have this instance."""
        gone: list[asyncio.Task[None]] = []
        changed = asyncio.create_task(self._change())
        try:
            while True:
                gone = self._adjust()
                await asyncio.gather(*gone, return_exceptions=True)  # they say no farewell, so it takes no time
                await asyncio.wait([*self._members.values(), changed], return_when=asyncio.FIRST_COMPLETED)
                for task in self._members.values():
                    if task.done():
                        task.result()
                if changed.done():
                    changed = asyncio.create_task(self._change())
        finally:
            tasks = [*self._members.values(), *gone, changed]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _adjust(self) -> list[asyncio.Task[None]]:
        """Begin with those that are new; returns the tasks of those that are gone, cancelled."""
        wanted = self._hearsay.conductors(_now())
        gone = [self._members.pop(address) for address in [*self._members] if address not in wanted]
        for task in gone:
            task.cancel()
        for address in wanted:
            if address not in self._members:
                self._members[address] = asyncio.create_task(self._report_to(address))
        return gone

    async def _report_to(self, address: str) -> None:
        self._untold[address] = deque(maxlen=TIMINGS_MAX)
        try:
            async with Client(self._transport, address) as client:
                load, heard = partial(self._load_for, address), partial(self._hear, address)
                member = Member(client, self._identity, load, heard, stays=lambda: self._stays(address))
                await member.run()
        finally:
            del self._untold[address]

    def _stays(self, address: str) -> bool:
        """Whether the instance leaves all, this Conductor among them; else only the Conductor has gone."""
        return address not in self._members

    def _load_for(self, address: str) -> Load:
        """The load as it is, with the timings that this Conductor has not been told yet: each pass is told once
        to everybody, and asking for the load takes them out."""
        told = self._load()
        for untold in self._untold.values():
            untold.extend(told.timings)
        mine = list(self._untold[address])
        self._untold[address].clear()
        return replace(told, timings=mine)

    async def _hear(self, address: str, news: Heard) -> None:
        together = self._hearsay.hear(address, news, _now())
        if set(self._hearsay.conductors(_now())) != self._members.keys():
            self._changed.set()
        await self._heard(together)


def _now() -> float:
    return asyncio.get_running_loop().time()
