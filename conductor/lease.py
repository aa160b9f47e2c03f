"""A lease as long as it is needed: renewed while held, given back at the end, whatever the end is."""

import asyncio
import logging
from types import TracebackType

from kvcache_pool.api import LEASE_S, Acquire, DirectoryLink, Lease, PoolFull
from protocol.errors import DangoError, RemoteError

RENEW_EVERY_S = LEASE_S / 3
"""Two renewals may fail before the lease ends."""

log = logging.getLogger("dango.dispatch")


class Room:
    """The line in front of a full pool. Requests get their leases in order of arrival, so a long prompt
    that waits for much room is not overtaken for ever by short ones. As long as the requests in flight."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first in, first out
        self._given_back = asyncio.Event()
        self._held = 0

    async def acquire(self, directory: DirectoryLink, ask: Acquire) -> Lease:
        """Wait for room as long as leases of ours are out that will make some. Raises PoolFull otherwise."""
        async with self._turn:
            while True:
                self._given_back.clear()
                try:
                    lease = await directory.get().acquire(ask)
                except PoolFull:
                    if not self._held:
                        raise
                    await self._given_back.wait()
                else:
                    self._held += 1
                    return lease

    def give_back(self) -> None:
        """A lease has been released: whoever is first in line may try again."""
        self._held -= 1
        self._given_back.set()


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
            self._room.give_back()

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
