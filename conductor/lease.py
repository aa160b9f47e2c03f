"""A lease as long as it is needed: renewed while held, given back at the end, whatever the end is."""

import asyncio
import logging
from dataclasses import dataclass, field
from types import TracebackType

from kvcache_pool.api import LEASE_S, Acquire, DirectoryLink, Lease, PoolFull, QuotaExceeded
from protocol.errors import DangoError, RemoteError
from protocol.ids import TenantId

RENEW_EVERY_S = LEASE_S / 3
"""Two renewals may fail before the lease ends."""

log = logging.getLogger("dango.dispatch")


@dataclass
class Line:
    """Who waits for room, first come, first served; and what may make some."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    given_back: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0
    """Leases that are out."""
    requests: int = 0
    """That hold a lease or want one."""


class Room:
    """The lines in front of a full pool. A tenant's requests get their leases in order of arrival, so a long
    prompt that waits for much room is not overtaken for ever by short ones. The first of each tenant stand in one
    line for the pool; who finds his tenant at its quota waits beside it, in nobody's way. As long as the requests
    in flight."""

    def __init__(self) -> None:
        self._pool = Line()
        self._tenants: dict[TenantId, Line] = {}  # of those that have requests

    async def acquire(self, directory: DirectoryLink, ask: Acquire) -> Lease:
        """Wait for room as long as leases of ours are out that will make some: the tenant's own, at its quota.
        Raises PoolFull, or of that QuotaExceeded, otherwise."""
        line = self._tenants.setdefault(ask.tenant, Line())
        line.requests += 1
        try:
            async with line.turn:
                while True:
                    line.given_back.clear()
                    try:
                        lease = await self._acquire(directory, ask)
                    except QuotaExceeded:
                        if not line.held:
                            raise
                        await line.given_back.wait()
                    else:
                        line.held += 1
                        return lease
        except BaseException:
            self._leave(ask.tenant)
            raise

    async def _acquire(self, directory: DirectoryLink, ask: Acquire) -> Lease:
        """The same of the pool alone."""
        async with self._pool.turn:
            while True:
                self._pool.given_back.clear()
                try:
                    lease = await directory.get().acquire(ask)
                except QuotaExceeded:
                    raise
                except PoolFull:
                    if not self._pool.held:
                        raise
                    await self._pool.given_back.wait()
                else:
                    self._pool.held += 1
                    return lease

    def give_back(self, tenant: TenantId) -> None:
        """A lease of this tenant has been released: whoever is first in a line may try again."""
        for line in (self._pool, self._tenants[tenant]):
            line.held -= 1
            line.given_back.set()
        self._leave(tenant)

    def _leave(self, tenant: TenantId) -> None:
        line = self._tenants[tenant]
        line.requests -= 1
        if not line.requests:
            del self._tenants[tenant]


class HeldLease:
    """An async context manager. `give_back` may come early; leaving the block does it otherwise.

    Giving back is a task of its own, made once: whoever is cancelled while he waits for it, it goes on.
    """

    def __init__(self, directory: DirectoryLink, room: Room, ask: Acquire) -> None:
        self._directory = directory
        self._room = room
        self._ask = ask
        self._keeper: asyncio.Task[None] | None = None
        self._return: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lease:
        try:
            lease = await self._room.acquire(self._directory, self._ask)
        except PoolFull:
            raise
        except BaseException:
            # Cancelled, or too late: the directory may have granted what we no longer wait for.
            await asyncio.shield(self._release())
            raise
        self._keeper = asyncio.create_task(self._keep())
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.give_back())

    def give_back(self) -> asyncio.Task[None]:
        """Release, from now on. If the directory cannot be told, the lease ends by itself."""
        if self._return is None:
            self._return = asyncio.create_task(self._give_back())
        return self._return

    async def _give_back(self) -> None:
        try:
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.gather(self._keeper, return_exceptions=True)
            await self._release()
        finally:
            self._room.give_back(self._ask.tenant)

    async def _release(self) -> None:
        try:
            await self._directory.get().release(self._ask.lease)
        except DangoError as error:
            log.warning("a lease could not be released: %s", error, extra={"request": self._ask.owner})

    async def _keep(self) -> None:
        """Renew until cancelled, or until the lease turns out to be lost (which its users will notice)."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await self._directory.get().renew(self._ask.lease)
            except RemoteError as error:
                log.warning("a lease was lost: %s", error, extra={"request": self._ask.owner})
                return
            except DangoError as error:
                log.warning("a lease was not renewed: %s", error, extra={"request": self._ask.owner})


class Countdown:
    """Gives a lease back as soon as the last of so many choices needs it no more."""

    def __init__(self, count: int, held: HeldLease) -> None:
        self._left = count
        self._held = held

    def one(self) -> None:
        """One choice has its KV, or needs none."""
        self._left -= 1
        if self._left == 0:
            self._held.give_back()  # on its own: no token waits for the directory
