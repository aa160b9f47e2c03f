"""Where the pool is, for those who are no members of the cluster: asked of the Conductor, and asked again."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvcache_pool.api import DIRECTORY_S, Directory, DirectoryLink
from protocol.cluster import Manifest
from protocol.errors import DangoError, DeadlineExceeded, PeerLost
from protocol.instance import addresses_in
from protocol.message import M, Message
from protocol.registry import DirectoryAt, GetDirectory, GetManifest
from protocol.rpc import Client
from protocol.transport import Transport

log = logging.getLogger("dango.pool")


class Guide:
    """Knows the directory. Owns the connections to it and to the Conductors until `aclose`.

    A directory that went away may listen elsewhere when it is back, so after a lost call the next one asks anew.
    No call is made twice here: that is for the caller to decide.
    """

    def __init__(self, transport: Transport, conductor: str | None, directory: str | None) -> None:
        """One of the two; a Conductor knows the directory's address. `conductor` may be several addresses with
        commas between, which are asked in turn. Raises ValueError if it names none."""
        addresses = [] if conductor is None else addresses_in(conductor)
        self._conductors = [Client(transport, address).start() for address in addresses]
        """The one that answered last is the first."""
        self._fixed = directory
        self._link = DirectoryLink(transport)
        self._known = False

    async def manifest(self) -> Manifest:
        """What the cluster serves. Raises PeerLost when no Conductor can be reached."""
        return await self._ask(GetManifest(), Manifest)

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
        if not self._conductors:
            assert self._fixed is not None, "one of the two addresses was given"
            return self._fixed
        found = await self._ask(GetDirectory(), DirectoryAt, lambda answer: answer.address is not None)
        assert found.address is not None, "an answer without one is of no use"
        return found.address

    async def _ask(self, message: Message, expect: type[M], is_useful: Callable[[M], bool] = lambda _: True) -> M:
        """The first useful answer. Raises what the only Conductor said, or PeerLost with what each of them did."""
        errors: list[DangoError] = []
        for client in list(self._conductors):
            try:
                answer = await client.call(message, expect, within_s=DIRECTORY_S)
                if not is_useful(answer):
                    raise PeerLost(f"the Conductor at {client.address} knows of no directory")
            except DangoError as error:
                errors.append(error)
                continue
            self._conductors.sort(key=lambda one: one is not client)
            return answer
        assert errors, "without a Conductor there is nobody to ask"
        if len(errors) == 1:
            raise errors[0]
        raise PeerLost("; ".join(map(str, errors)))

    async def aclose(self) -> None:
        """Disconnect."""
        await self._link.aclose()
        for client in self._conductors:
            await client.aclose()
