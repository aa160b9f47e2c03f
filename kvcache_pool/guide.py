"""Where the pool is, for those who are no members of the cluster: asked of the Conductor, and asked again."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvcache_pool.api import DIRECTORY_S, Directory, DirectoryLink
from protocol.cluster import Manifest
from protocol.errors import DeadlineExceeded, PeerLost
from protocol.registry import DirectoryAt, GetDirectory, GetManifest
from protocol.rpc import Client
from protocol.transport import Transport

log = logging.getLogger("dango.pool")


class Guide:
    """Knows the directory. Owns the connections to it and to the Conductor until `aclose`.

    A directory that went away may listen elsewhere when it is back, so after a lost call the next one asks anew.
    No call is made twice here: that is for the caller to decide.
    """

    def __init__(self, transport: Transport, conductor: str | None, directory: str | None) -> None:
        """One of the two addresses; the Conductor knows that of the directory."""
        self._conductor = None if conductor is None else Client(transport, conductor).start()
        self._fixed = directory
        self._link = DirectoryLink(transport)
        self._known = False

    async def manifest(self) -> Manifest:
        """What the cluster serves. Raises PeerLost when the Conductor cannot be reached."""
        assert self._conductor is not None, "without a Conductor there is nobody to ask"
        return await self._conductor.call(GetManifest(), Manifest, within_s=DIRECTORY_S)

    @asynccontextmanager
    async def directory(self) -> AsyncIterator[Directory]:
        """The directory, for some calls. Raises PeerLost while there is none."""
        if not self._known:
            await self._link.follow(await self._address())
            self._known = True
        try:
            yield self._link.get()
        except (PeerLost, DeadlineExceeded) as error:
            log.info("the pool's directory is asked for again: %s", error)
            self._known = False
            raise

    async def _address(self) -> str:
        if self._conductor is None:
            assert self._fixed is not None, "one of the two addresses was given"
            return self._fixed
        found = await self._conductor.call(GetDirectory(), DirectoryAt, within_s=DIRECTORY_S)
        if found.address is None:
            raise PeerLost(f"the Conductor at {self._conductor.address} knows of no directory")
        return found.address

    async def aclose(self) -> None:
        """Disconnect."""
        await self._link.aclose()
        if self._conductor is not None:
            await self._conductor.aclose()
