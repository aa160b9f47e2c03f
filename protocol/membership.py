"""An instance's side of the registry: register, report, hear where the rest of the cluster is.

With one Conductor, that is; `protocol/memberships.py` keeps one for each.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from protocol.errors import DangoError, RemoteError
from protocol.registry import DEAD_AFTER_REPORTS, REPORT_EVERY_S, Heard, Leave, Load, Register, Report, Welcome
from protocol.rpc import Client

REGISTRY_S = 5.0
"""The deadline of a registration."""

REPORT_PERIODS = DEAD_AFTER_REPORTS / 2
"""The deadline of a report, in times between reports: when it was lost, or its answer, there is time for one more
before this instance is given up."""

LEAVE_S = 0.3
"""How long an ending instance tries to say so; the registry would notice by itself a little later."""

log = logging.getLogger("dango.member")


class Member:
    """Keeps one instance registered, whatever happens to the Conductor meanwhile.

    `load` is asked at each report; `heard` is awaited with each answer. `stays` is asked at the end: whether the
    instance lives on without this Conductor, which must then not be told that it has ended.
    """

    def __init__(
        self,
        client: Client,
        identity: Register,
        load: Callable[[], Load],
        heard: Callable[[Heard], Awaitable[None]],
        stays: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._identity = identity
        self._load = load
        self._heard = heard
        self._report_s = REPORT_EVERY_S
        self._stays = stays

    async def run(self) -> None:
        """Until cancelled. Raises Mismatch or Superseded when the cluster will not have this instance."""
        known, failures = False, 0
        try:
            while True:
                try:
                    if not known:
                        await self._register()
                        failures = 0
                    known = await self._report()  # at once after registering: it says how fast this instance is
                    failures = 0
                except RemoteError:
                    raise
                except DangoError as error:  # away or restarting: serving goes on with what is known
                    known, failures = False, failures + 1
                    level = logging.WARNING if failures > 1 else logging.DEBUG  # one failure: perhaps all stop
                    log.log(level, "the conductor does not answer: %s", error)
                await asyncio.sleep(self._report_s)
        finally:
            if not self._stays():
                await self._leave()

    async def _register(self) -> None:
        welcome = await self._client.call(self._identity, Welcome, within_s=REGISTRY_S)
        log.info("registered", extra={"instance": self._identity.instance})
        self._report_s = welcome.heard.report_s
        await self._heard(welcome.heard)

    async def _report(self) -> bool:
        report = Report(self._identity.instance, self._identity.incarnation, self._load())
        heard = await self._client.call(report, Heard, within_s=REPORT_PERIODS * self._report_s)
        self._report_s = heard.report_s
        if heard.known:
            await self._heard(heard)
        return heard.known

    async def _leave(self) -> None:
        leave = Leave(self._identity.instance, self._identity.incarnation)
        try:
            await self._client.call(leave, Heard, within_s=LEAVE_S)
        except DangoError as error:
            log.debug("left without a farewell: %s", error)
