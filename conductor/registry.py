"""The registry: instances register and report here, and those that fall silent are given up.

Every Conductor of a cluster hears every instance itself. What they tell each other is in `conductor/presence.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from conductor.estimate import Estimates
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.roster import Roster
from conductor.view import Instance, View
from kvcache_pool.api import DirectoryLink
from protocol.cluster import Manifest, Mismatch
from protocol.ids import Incarnation, InstanceId
from protocol.message import Message
from protocol.pause import sleep_unless_paused
from protocol.registry import (
    DirectoryAt,
    GetDirectory,
    GetManifest,
    Heard,
    Leave,
    Pool,
    Register,
    Report,
    Superseded,
    Welcome,
)
from protocol.rpc import Ask, Handler, at_once, handler

EXPIRE_EVERY_S = 0.5
"""How often silence is looked for; small against the time after which an instance is dead."""

log = logging.getLogger("dango.registry")


class Registry:
    """Handlers for the control port, and the loop that gives up the silent."""

    def __init__(
        self,
        view: View,
        peers: Peers,
        directory: DirectoryLink,
        metrics: Metrics,
        estimates: Estimates,
        roster: Roster | None = None,
    ) -> None:
        self._view = view
        self._peers = peers
        self._directory = directory
        self._metrics = metrics
        self._estimates = estimates
        self._roster = roster or Roster()

    @property
    def degraded(self) -> list[str]:
        """What is not as it should be while all goes on."""
        return [self._roster.fault] if self._roster.fault else []

    def handlers(self) -> Mapping[type[Message], Handler]:
        """What the control port answers."""
        return dict(
            [
                handler(Register, self.register),
                at_once(Report, self.report),
                handler(Leave, self.leave),
                at_once(GetManifest, self.get_manifest),
                at_once(GetDirectory, self.get_directory),
            ]
        )

    async def register(self, message: Register, ask: Ask) -> Welcome:
        """Let an instance in. Raises Mismatch, Superseded."""
        older = self._view.register(message, _now())
        log.info("joined", extra={"instance": message.instance, "pool": message.pool.value})
        if older is not None:
            self._roster.end(older.incarnation)
            await self._bury(older)
        await self._directory.follow(self._view.directory)
        return Welcome(self._heard(message.instance))

    def report(self, message: Report) -> Heard:
        """Take in a heartbeat."""
        now = _now()
        known = self._view.report(message.instance, message.incarnation, message.load, now)
        if not known:
            return Heard(False, self._view.directory, None, self._view.report_s, self._roster.conductors)
        instance = self._view.find(message.instance)
        assert instance is not None
        self._metrics.set_pool_load(instance.pool, instance.name, message.load)
        self._estimates.learn(instance.pool, instance.kind, instance.incarnation, message.load.timings, now)
        return self._heard(message.instance)

    async def leave(self, message: Leave, ask: Ask) -> Heard:
        """An instance ends in good order."""
        instance = self._view.leave(message.instance, message.incarnation)
        if instance is not None:
            log.info("left", extra={"instance": instance.name})
            await self._bury(instance)
        return Heard(instance is not None, self._view.directory)

    def get_manifest(self, _: GetManifest) -> Manifest:
        """What a KVCache instance lays its memory out by."""
        return self._view.manifest

    def get_directory(self, _: GetDirectory) -> DirectoryAt:
        """For those who use the pool and are in none."""
        return DirectoryAt(self._view.directory)

    async def believe(self, present: Iterable[Register]) -> None:
        """Let in whom other Conductors know, so that this one need not wait for their reports. Who does not report
        here too is given up in the usual time."""
        for message in present:
            try:
                if self._view.find(message.instance) is None:
                    self._view.register(message, _now())
            except (Mismatch, Superseded) as error:
                log.info("not taken over: %s", error, extra={"instance": message.instance})
        await self._directory.follow(self._view.directory)

    async def supersede(self, incarnations: Iterable[Incarnation]) -> None:
        """Other Conductors know of newer lives than these."""
        for instance in self._view.supersede(incarnations):
            log.info("replaced, another conductor says", extra={"instance": instance.name})
            await self._bury(instance)

    async def expire_forever(self, dropped: Callable[[], int]) -> None:
        """Until cancelled. `dropped` tells how many frames the control port has dropped since its start."""
        counted = 0
        while True:
            listened = await sleep_unless_paused(EXPIRE_EVERY_S)
            self._metrics.bad_frames(dropped() - counted)
            counted = dropped()
            self._metrics.set_degraded(bool(self.degraded))
            if not listened:
                continue  # their reports lie unread
            for pool in Pool:
                self._metrics.set_stale(pool, self._view.stale(pool, _now()))
            for instance in self._view.expire(_now()):
                log.warning("given up: no report", extra={"instance": instance.name})
                await self._bury(instance)

    async def give_up(self, instance: Instance) -> None:
        """An instance could not be reached: nothing more is placed there until it registers again."""
        if self._view.give_up(instance):
            log.warning("given up: its connection broke", extra={"instance": instance.name})
            await self._bury(instance)

    async def _bury(self, instance: Instance) -> None:
        self._metrics.drop_instance(instance.pool, instance.name)
        await self._peers.drop(instance)
        await self._directory.follow(self._view.directory)

    def _heard(self, name: InstanceId) -> Heard:
        instance = self._view.find(name)
        home = None if instance is None else self._view.home(instance)
        return Heard(True, self._view.directory, home, self._view.report_s, self._roster.conductors)


def _now() -> float:
    return asyncio.get_running_loop().time()
