"""A lease as long as it is needed: renewed while held, given back at the end, whatever the end is."""

import asyncio
import contextlib
import logging
from types import TracebackType

from kvcache_pool.api import LEASE_S, Acquire, DirectoryLink, Lease
from protocol.errors import DangoError, RemoteError

RENEW_EVERY_S = LEASE_S / 3
"""Two renewals may fail before the lease ends."""

log = logging.getLogger("dango.dispatch")


class HeldLease:
    """An async context manager. `give_back` may come early; leaving the block does it otherwise."""

    def __init__(self, directory: DirectoryLink, ask: Acquire) -> None:
        self._directory = directory
        self._ask = ask
        self._lease: Lease | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lease:
        self._lease = await self._directory.get().acquire(self._ask)
        self._keeper = asyncio.create_task(self._keep(self._lease))
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.give_back())

    async def give_back(self) -> None:
        """Release now. If the directory cannot be told, the lease ends by itself."""
        lease, self._lease = self._lease, None
        if lease is None or self._keeper is None:
            return
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        try:
            await self._directory.get().release(lease.lease)
        except DangoError as error:
            log.warning("a lease could not be released: %s", error, extra={"request": self._ask.owner})

    async def _keep(self, lease: Lease) -> None:
        """Renew until cancelled, or until the lease turns out to be lost (which its users will notice)."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await self._directory.get().renew(lease.lease)
            except RemoteError as error:
                log.warning("a lease was lost: %s", error, extra={"request": self._ask.owner})
                return
            except DangoError as error:
                log.warning("a lease was not renewed: %s", error, extra={"request": self._ask.owner})
