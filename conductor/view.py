"""What the Conductor believes: who is alive, how loaded, and what it has placed where itself.

Pure. Reports correct the belief, the ledger of own placements bridges the time between reports, and a
report that is late means unknown, not full.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from conductor.ask import Priority
from conductor.health import Health
from protocol.cluster import Manifest, Mismatch
from protocol.ids import Incarnation, InstanceId, RequestId, SegmentId
from protocol.registry import DEAD_AFTER_REPORTS, REPORT_EVERY_S, Load, Pool, Register, Superseded

DEAD_MAX = 256
"""Ended incarnations that are remembered, so that a late message of theirs is told from a newcomer's."""

STALE_REPORTS = 3
"""A report older than so many (two are missing) says nothing of what runs now: the ledger is believed then."""

DEAF_TIMES = 10
"""While nobody at all is heard of, nobody is given up for so many times as long as one would have been: it is this
side that hears nothing, most likely. Broken connections tell who is really gone."""

Key = tuple[RequestId, int]
"""A request and one of its choices: an entry of the ledger."""


@dataclass
class Prefilling:
    """A prompt that was placed on a prefill instance and is not computed yet."""

    tokens: int
    """To compute; those of the reused prefix do not count."""
    prefix: int
    """Reused tokens before them."""
    seconds: float
    """Predicted for it alone, loading included."""
    since: float
    """Its turn came then: when it was placed, or when the one before it was done."""


@dataclass
class Stream:
    """One answer that a decode instance makes, or will make when its prompt has been computed."""

    context: int
    """Tokens of its prompt, whose KV every step reads."""
    due_at: float
    """When its prompt is expected to be computed."""
    priority: Priority = Priority.INTERACTIVE
    joined_at: float | None = None
    """When it joined the batch; None while it is on its way."""
    said: int = 0
    """Tokens of the answer that we have heard."""
    said_at: float = 0.0
    """When we heard the last of them."""
    tbt_s: float = math.inf
    """The time between tokens that it was promised: whoever joins it later must leave it that."""
    handed_over: bool = False
    """Its prompt is computed, or will be here, and this instance is settled."""
    rest_s: float = 0.0
    """A step takes so much longer until its first token, if this instance computes part of its prompt; else 0."""


@dataclass
class Instance:
    """One living instance, and the ledger of what was placed there and has not ended."""

    name: InstanceId
    incarnation: Incarnation
    pool: Pool
    address: str
    host: str
    directory: bool
    heard_at: float
    """When it last registered or reported: it was alive then."""
    reported_at: float
    """When it said what `load` says."""
    kind: str = ""
    load: Load = field(default_factory=Load)
    prompts: dict[Key, Prefilling] = field(default_factory=dict)
    """Of a prefill instance, in the order in which it computes them."""
    streams: dict[Key, Stream] = field(default_factory=dict)
    """Of a decode instance."""
    turn: int = 0
    """When a prompt was last placed here, counted in prompts: who has waited longest has the lowest."""
    foreign: int = 0
    """Requests that a decode instance reported and the ledger knew nothing of at that moment."""

    def queue_s(self, now: float) -> float:
        """Predicted time until a prompt that is placed here now would have its turn."""
        if not self.prompts:
            return 0.0
        first = next(iter(self.prompts.values()))
        done = min(max(now - first.since, 0.0), first.seconds)
        return sum(prompt.seconds for prompt in self.prompts.values()) - done

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences that decode here, and tokens of their context, as far as the ledger knows."""
        contexts = [
            stream.context + stream.said for stream in self.streams.values() if stream.joined_at is not None
        ]
        return len(contexts), sum(contexts)

    @property
    def computes_rest(self) -> bool:
        """Whether part of a prompt is computed beside the batch here, or will be."""
        return any(stream.rest_s and not stream.said for stream in self.streams.values())

    def next_rest_s(self, step_s: float, now: float) -> float:
        """What the next step takes longer for part of a prompt that is computed beside the batch. `step_s` is a
        step without: when the last one with a part should have begun, the next is another."""
        there = [s for s in self.streams.values() if s.rest_s and s.joined_at is not None and not s.said]
        return sum(s.rest_s for s in there if now < s.due_at - s.rest_s - step_s)

    @property
    def idle(self) -> bool:
        """Whether nothing is placed here."""
        return not self.prompts and not self.streams


class View:
    """All living instances. Mutates: register, report, leave, expire, give_up, and the ledger's enter to sent."""

    def __init__(self, manifest: Manifest, report_s: float = REPORT_EVERY_S) -> None:
        self.manifest = manifest
        self.report_s = report_s
        """How often instances are asked to report."""
        self.sending: dict[SegmentId, int] = {}
        """Bytes of fetched prefixes that are on their way, by the segment that sends them."""
        self.health = Health()
        """Who fails what is placed there. The dispatcher tells it."""
        self._instances: dict[InstanceId, Instance] = {}
        self._ended: dict[Incarnation, None] = {}
        self._turns = 0
        self._heard_at = -math.inf  # when anybody was last heard of
        self._patient_until = -math.inf
        self._pools: dict[Pool, list[Instance]] = {}
        self._homes: dict[tuple[InstanceId, str], SegmentId | None] = {}
        self._changed()

    def register(self, message: Register, now: float) -> Instance | None:
        """Let an instance in; returns the older incarnation that it replaces. Raises Mismatch, Superseded."""
        self.manifest.require_equal(message.manifest)
        if message.incarnation in self._ended:
            raise Superseded(f"{message.instance} has been replaced, or was given up, in this incarnation")
        older = self._instances.get(message.instance)
        self._require_free(message, older)
        if older is not None and older.incarnation != message.incarnation:
            self._end(older)
        same = older is not None and older.incarnation == message.incarnation
        # Of the same life all runs on that is there, and what it reported is as old as it was.
        newer = replace(older, heard_at=now) if older is not None and same else _instance_of(message, now)
        self._instances[message.instance] = newer
        self._changed()
        self._hear(now)
        return None if same else older

    def _require_free(self, message: Register, older: Instance | None) -> None:
        """A name belongs to one pool, and the directory to one instance. Raises Mismatch."""
        if older is not None and older.pool is not message.pool:
            raise Mismatch(f"the name {message.instance} belongs to a {older.pool.value} instance")
        keepers = [i.name for i in self.of(Pool.KVCACHE) if i.directory and i.name != message.instance]
        if message.directory and keepers:
            raise Mismatch(f"{keepers[0]} keeps the directory already: start this one with --no-directory")

    def report(self, name: InstanceId, incarnation: Incarnation, load: Load, now: float) -> bool:
        """Take in a report. False: no such instance is known here."""
        instance = self._instances.get(name)
        if instance is None or instance.incarnation != incarnation:
            return False
        moved = instance.load.draining != load.draining
        instance.load, instance.heard_at, instance.reported_at = load, now, now
        if moved:
            self._homes.clear()
        self._hear(now)
        if instance.pool is Pool.DECODE:
            instance.foreign = max(load.running + load.waiting - len(instance.streams), 0)
        return True

    def leave(self, name: InstanceId, incarnation: Incarnation) -> Instance | None:
        """An instance says that it ends."""
        instance = self._instances.get(name)
        if instance is None or instance.incarnation != incarnation:
            return None
        return self._end(instance)

    def supersede(self, incarnations: Iterable[Incarnation]) -> list[Instance]:
        """Newer lives than these are known elsewhere; returns those that were alive here."""
        ended = set(incarnations)
        living = [instance for instance in self._instances.values() if instance.incarnation in ended]
        for instance in living:
            self._end(instance)
        for incarnation in sorted(ended - self._ended.keys()):
            self._remember(incarnation)
        return living

    def expire(self, now: float) -> list[Instance]:
        """Give up those that missed DEAD_AFTER_REPORTS reports, unless all did. They may register again."""
        if self._dead_s < now - self._heard_at <= DEAF_TIMES * self._dead_s or now < self._patient_until:
            return []
        silent = [i for i in self._instances.values() if now - i.heard_at > self._dead_s]
        for instance in silent:
            del self._instances[instance.name]
        if silent:
            self._changed()
        return silent

    def give_up(self, instance: Instance) -> bool:
        """An instance could not be reached: it is out until it registers again, as a living one will.

        False if it is out already, or has registered again meanwhile."""
        if self._instances.get(instance.name) is not instance:
            return False
        del self._instances[instance.name]
        self._changed()
        return True

    def of(self, pool: Pool) -> list[Instance]:
        """The living instances of a pool, by name."""
        return self._pools[pool].copy()

    def lives(self, instance: Instance) -> bool:
        """Whether it is alive, in this incarnation."""
        living = self._instances.get(instance.name)
        return living is not None and living.incarnation == instance.incarnation

    def able(self, pool: Pool, now: float, avoid: Collection[Incarnation] = ()) -> list[Instance]:
        """Those of a pool that may be given work: who is not ejected, and none of `avoid`, who have failed this
        request, unless all is forgiven. If nobody is left, then others: a bad chance is better than none."""
        instances = self.of(pool)
        if not self.health:
            return instances
        takers = [i for i in instances if self.health.takes(i.incarnation, now, idle=i.idle)] or instances
        return [i for i in takers if i.incarnation not in avoid] or takers

    def find(self, name: InstanceId) -> Instance | None:
        """A living instance by name."""
        return self._instances.get(name)

    def stale(self, pool: Pool, now: float) -> int:
        """Living instances of a pool whose latest report is too old to say what runs there."""
        return sum(now - instance.reported_at > STALE_REPORTS * self.report_s for instance in self.of(pool))

    @property
    def directory(self) -> str | None:
        """Where the KVCache pool's directory listens; the first by name, should there be two."""
        return next((i.address for i in self.of(Pool.KVCACHE) if i.directory), None)

    @property
    def blocks_total(self) -> float:
        """Blocks of the whole pool, as its directory reports them; infinite before its first report."""
        totals = [i.load.blocks_total for i in self.of(Pool.KVCACHE) if i.directory]
        return totals[0] if totals and totals[0] else math.inf

    def home(self, instance: Instance) -> SegmentId | None:
        """The segment nearest to an instance: on its host; instances of a pool are dealt over several. One that is
        drained is nobody's home while there is another.

        Every placement asks it of every instance, so it is kept until somebody joins or goes, or is drained."""
        place = instance.name, instance.host
        if place not in self._homes:
            self._homes[place] = self._home(instance)
        return self._homes[place]

    def _home(self, instance: Instance) -> SegmentId | None:
        all_of_them = self.of(Pool.KVCACHE)
        if not all_of_them:
            return None
        stay = [i for i in all_of_them if not i.load.draining] or all_of_them
        segments = [i for i in stay if i.host == instance.host] or stay
        peers = [i.name for i in self.of(instance.pool) if i.host == instance.host]
        turn = peers.index(instance.name) if instance.name in peers else 0
        return SegmentId(segments[turn % len(segments)].name)

    def enter(self, instance: Instance, key: Key, entry: Prefilling | Stream) -> None:
        """Enter a placement in the ledger."""
        if isinstance(entry, Prefilling):
            instance.prompts[key] = entry
            self._turns += 1
            instance.turn = self._turns
        else:
            instance.streams[key] = entry

    def release(self, instance: Instance, key: Key, now: float) -> None:
        """The request no longer loads this instance: it is done there, or gone."""
        instance.streams.pop(key, None)
        first = next(iter(instance.prompts), None)
        instance.prompts.pop(key, None)
        if first == key and instance.prompts:
            following = next(iter(instance.prompts.values()))
            following.since = max(following.since, now)

    def joined(self, instance: Instance, key: Key, now: float) -> None:
        """A stream has joined the batch of its decode instance."""
        stream = instance.streams.get(key)
        if stream is not None:
            stream.joined_at = stream.said_at = now

    def said(self, instance: Instance, key: Key, tokens: int, now: float) -> None:
        """So many more tokens of a stream have come."""
        stream = instance.streams.get(key)
        if stream is not None:
            stream.said += tokens
            stream.said_at = now

    def send(self, source: SegmentId, bytes_: int) -> None:
        """So many bytes begin their way from a segment; `sent` must follow."""
        assert bytes_ > 0
        self.sending[source] = self.sending.get(source, 0) + bytes_

    def sent(self, source: SegmentId, bytes_: int) -> None:
        """Bytes that `send` entered have arrived, or are given up."""
        self.sending[source] -= bytes_
        if not self.sending[source]:
            del self.sending[source]

    def missing(self) -> list[str]:
        """Why requests cannot be served: a sentence for each pool without an instance."""
        gone = [f"no {pool.value} instance is alive" for pool in Pool if not self.of(pool)]
        if self.of(Pool.KVCACHE) and self.directory is None:
            gone.append("no kvcache instance keeps the directory")
        return gone

    def check(self) -> None:
        """Asserts that names are unique and nobody is both alive and ended."""
        assert all(name == instance.name for name, instance in self._instances.items())
        assert not any(instance.incarnation in self._ended for instance in self._instances.values())
        assert all(bytes_ > 0 for bytes_ in self.sending.values()), "what arrived had been sent"
        assert sum(map(len, self._pools.values())) == len(self._instances)
        assert all(self.home(i) == self._home(i) for i in self._instances.values())

    @property
    def _dead_s(self) -> float:
        return DEAD_AFTER_REPORTS * self.report_s

    def _hear(self, now: float) -> None:
        """Somebody is heard of. If nobody was for long, the others get time to be heard again."""
        if self._dead_s < now - self._heard_at < math.inf:
            self._patient_until = now + self._dead_s
        self._heard_at = now

    def _changed(self) -> None:
        """Who is alive has changed, and with it who is at home where."""
        by_name = sorted(self._instances.values(), key=lambda i: i.name)
        self._pools = {pool: [i for i in by_name if i.pool is pool] for pool in Pool}
        self._homes.clear()

    def _end(self, instance: Instance) -> Instance:
        del self._instances[instance.name]
        self._remember(instance.incarnation)
        self._changed()
        return instance

    def _remember(self, ended: Incarnation) -> None:
        self._ended[ended] = None
        if len(self._ended) > DEAD_MAX:
            del self._ended[next(iter(self._ended))]


def _instance_of(message: Register, now: float) -> Instance:
    return Instance(
        message.instance,
        message.incarnation,
        message.pool,
        message.address,
        message.host,
        message.directory,
        heard_at=now,
        reported_at=now,
        kind=message.kind,
    )
