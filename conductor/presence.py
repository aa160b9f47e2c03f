"""What Conductors of one cluster tell each other through Redis: who is there, and by which manifest.

    dango:manifest              JSON     the manifest of the cluster: whoever differs stays outside
    dango:conductors            set      control ports that may be there
    dango:conductor:ADDRESS     text     there is one; the digest of its manifest
    dango:instances             set      names that may be there
    dango:instance:NAME         JSON     one that reports to some Conductor (`Present`)
    dango:ended                 list     incarnations that a newer one has replaced

All of it expires; every Conductor writes its own part again each period, and reads the rest. So a Redis that comes
back empty is full again one period later, and there is no subscription to lose. No request ever waits for it.
"""

import asyncio
import contextlib
import logging
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from conductor.registry import Registry
from conductor.roster import Roster, digest_of, of_text, present_of, registrations, to_text
from conductor.view import DEAD_MAX, View
from protocol.cluster import Manifest, Mismatch
from protocol.errors import BadMessage
from protocol.ids import Incarnation
from protocol.registry import DEAD_AFTER_REPORTS, Pool

REDIS_S = 1.0
"""The deadline of one exchange, connecting included: it answers in milliseconds, or is away."""

EXPIRY_S_MIN = 3.0
"""Nothing expires sooner, however often instances report: a busy Redis must not make anybody vanish."""

CLOSE_S = 0.3
"""How long an ending Conductor tries to strike itself off; its entry expires by itself a little later."""

ENDED_S = 3600
"""How long ended lives are remembered: a process that was stopped for longer is a curiosity."""

MEMBERS_MAX = 4096
"""Names that are read of one set. Only a fault reaches it."""

MANIFEST_KEY, ENDED = "dango:manifest", "dango:ended"
CONDUCTORS, CONDUCTOR = "dango:conductors", "dango:conductor:"
INSTANCES, INSTANCE = "dango:instances", "dango:instance:"

log = logging.getLogger("dango.presence")


class Away(Exception):
    """Redis could not be asked, or its answer made no sense; says why."""


class Presence:
    """Keeps a Roster in step with Redis. Owns the connection."""

    def __init__(self, url: str, address: str, view: View, registry: Registry, roster: Roster) -> None:
        """`address` is this Conductor's control port. Raises ValueError for a URL that is none."""
        self._url = url
        self._address = address
        self._view = view
        self._registry = registry
        self._roster = roster
        self._expiry_ms = int(expiry_s(view.report_s) * 1000)
        self._digest = digest_of(view.manifest)
        self._redis: Redis | None = None
        self._connect()

    async def open(self) -> None:
        """The first exchange. Raises Mismatch if the cluster in Redis is another; a Redis that is away is none."""
        try:
            await self._registry.believe(registrations(await self._exchange(), self._view.manifest))
        except Away as error:
            self._fall_silent(str(error))

    async def run(self) -> None:
        """Until cancelled: one exchange each period, whatever becomes of it."""
        while True:
            await asyncio.sleep(self._view.report_s)
            try:
                await self._exchange()
            except Away as error:
                self._fall_silent(str(error))
            except Mismatch as error:
                self._fall_silent(f"Redis belongs to another cluster: {error}")

    async def aclose(self) -> None:
        """Strike this Conductor off, if that is quick."""
        redis = self._connect()
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if not self._roster.fault:
                    await redis.delete(CONDUCTOR + self._address)
        await self._disconnect()

    async def _exchange(self) -> dict[str, str]:
        """Tell and hear; returns what is written down of instances, by name. Raises Mismatch, Away."""
        try:
            return await self._talk()
        finally:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # redis-py sends with asyncio.wait_for, which before Python 3.12 can lose a cancellation that comes
                # in the moment in which it is done. This process would never end.
                raise asyncio.CancelledError

    async def _talk(self) -> dict[str, str]:
        try:
            async with asyncio.timeout(REDIS_S):
                redis = self._connect()
                await self._agree(redis)
                conductors, names, ended = await self._tell(redis)
                there = await self._still_there(redis, CONDUCTORS, CONDUCTOR, conductors)
                instances = await self._still_there(redis, INSTANCES, INSTANCE, names)
        except TimeoutError:
            await self._disconnect()
            raise Away(f"Redis did not answer within {REDIS_S:g} s") from None
        except (RedisError, OSError, BadMessage, UnicodeError) as error:
            await self._disconnect()
            raise Away(f"Redis cannot be used: {error}") from error
        except BaseException:
            await self._disconnect()  # an answer may be under way: the next exchange must not take it for its own
            raise
        if self._roster.fault:
            log.info("redis is back")
        self._roster.hear(list(there), asyncio.get_running_loop().time())
        await self._registry.supersede(self._roster.learn(map(Incarnation, ended)))
        return instances

    async def _agree(self, redis: Redis) -> None:
        """Write the manifest down, or find it equal. Raises Mismatch; Away if it expired in between."""
        ours = self._view.manifest
        if await redis.set(MANIFEST_KEY, to_text(ours), nx=True, px=self._expiry_ms):
            return
        text = await redis.get(MANIFEST_KEY)
        if text is None:
            raise Away("the manifest in Redis expired this moment")
        of_text(Manifest, str(text)).require_equal(ours)

    async def _tell(self, redis: Redis) -> tuple[list[str], list[str], list[str]]:
        """Write down what is known here; returns the sets of Conductors and instances, and the ended lives."""
        instances = [instance for pool in Pool for instance in self._view.of(pool)]
        untold = self._roster.tell()
        async with redis.pipeline(transaction=False) as pipe:
            pipe.pexpire(MANIFEST_KEY, self._expiry_ms)
            pipe.set(CONDUCTOR + self._address, self._digest, px=self._expiry_ms)
            pipe.sadd(CONDUCTORS, self._address)
            for instance in instances:
                text = to_text(present_of(instance, self._digest))
                pipe.set(INSTANCE + instance.name, text, px=self._expiry_ms)
                pipe.sadd(INSTANCES, instance.name)
            for name in (CONDUCTORS, INSTANCES):
                pipe.expire(name, ENDED_S)
            if untold:
                pipe.rpush(ENDED, *untold)
                pipe.ltrim(ENDED, -DEAD_MAX, -1)
                pipe.expire(ENDED, ENDED_S)
            pipe.smembers(CONDUCTORS)
            pipe.smembers(INSTANCES)
            pipe.lrange(ENDED, -DEAD_MAX, -1)
            answers = await pipe.execute()
        self._roster.told(untold)
        conductors, names, ended = answers[-3:]
        return sorted(conductors)[:MEMBERS_MAX], sorted(names)[:MEMBERS_MAX], ended

    async def _still_there(self, redis: Redis, set_: str, prefix: str, names: list[str]) -> dict[str, str]:
        """Of these members of a set, the values of those whose entry has not expired; the others leave the set."""
        if not names:
            return {}
        values = await redis.mget([prefix + name for name in names])
        there = {name: str(value) for name, value in zip(names, values, strict=True) if value is not None}
        gone = [name for name in names if name not in there]
        if gone:
            await redis.srem(set_, *gone)
        return there

    def _fall_silent(self, fault: str) -> None:
        if fault != self._roster.fault:
            log.warning("serving goes on with what is known: %s", fault)
        self._roster.silence(fault)

    def _connect(self) -> Redis:
        if self._redis is None:
            patience: dict[str, Any] = {"socket_timeout": REDIS_S, "socket_connect_timeout": REDIS_S}
            once = Retry(NoBackoff(), 0)  # the next period is the next attempt
            self._redis = Redis.from_url(self._url, decode_responses=True, retry=once, **patience)
        return self._redis

    async def _disconnect(self) -> None:
        """A connection that failed, or was given up in the middle of an answer, is never used again."""
        redis, self._redis = self._redis, None
        if redis is not None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await redis.aclose()


def expiry_s(report_s: float) -> float:
    """How long what is in Redis lasts unless it is written again."""
    return max(DEAD_AFTER_REPORTS * report_s, EXPIRY_S_MIN)
