"""Which Conductors share this cluster, as far as this one has heard, and what they write down in Redis. Pure.

While Redis is silent nobody is struck off: whoever was there still is, for all that anybody knows.
"""

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from conductor.view import DEAD_MAX, Instance
from protocol.cluster import Manifest
from protocol.errors import BadMessage
from protocol.ids import Incarnation, InstanceId
from protocol.message import M, Message, build, pack, unpack_plain
from protocol.registry import Pool, Register

DIGEST_CHARS = 16
"""Of the manifest, for comparison at a glance: Redis holds the whole."""


class Present(Message):
    """One living instance, as a Conductor that hears its reports writes it down."""

    instance: InstanceId
    incarnation: Incarnation
    pool: Pool
    address: str
    host: str
    directory: bool
    kind: str
    manifest: str
    """Digest of what it registered with."""


class Roster:
    """The Conductors, and what this one has to tell them. Without an own address it is alone, and stays so.

    Mutates: hear, silence, end, told, learn.
    """

    def __init__(self, own: str = "", patience_s: float = 0.0) -> None:
        """`own` is this Conductor's control port. `patience_s` is how long after Redis' return others have to
        write themselves down again, before they are struck off: it may have come back empty."""
        self._own = own
        self._patience_s = patience_s
        self._others: set[str] = set()
        self._patient_until = 0.0
        self._untold: deque[Incarnation] = deque(maxlen=DEAD_MAX)
        self._known: frozenset[Incarnation] = frozenset()
        self.fault = ""
        """Why the others are not heard of at the moment; empty while they are."""

    @property
    def conductors(self) -> list[str]:
        """Control ports, for instances to report to; empty if this Conductor is alone by configuration."""
        return sorted({self._own} | self._others) if self._own else []

    def hear(self, present: Collection[str], now: float) -> None:
        """These Conductors are written down in Redis at this moment."""
        if self.fault:
            self._patient_until = now + self._patience_s
            self.fault = ""
        others = set(present) - {self._own}
        self._others = self._others | others if now < self._patient_until else others

    def silence(self, fault: str) -> None:
        """Nothing could be heard, and why."""
        self.fault = fault

    def end(self, incarnation: Incarnation) -> None:
        """A newer life has replaced this one: the other Conductors must be told."""
        self._untold.append(incarnation)

    def tell(self) -> list[Incarnation]:
        """The ended lives that the others have not been told of. `told` takes them out."""
        return list(self._untold)

    def told(self, incarnations: Collection[Incarnation]) -> None:
        """These have been written down."""
        self._untold = deque((i for i in self._untold if i not in set(incarnations)), DEAD_MAX)

    def learn(self, ended: Iterable[Incarnation]) -> list[Incarnation]:
        """What is written down of ended lives; returns what is new since the last time."""
        known = frozenset(ended)
        news = sorted(known - self._known)
        self._known = known
        return news


def digest_of(manifest: Manifest) -> str:
    """Equal for equal manifests."""
    return hashlib.sha256(to_text(manifest).encode()).hexdigest()[:DIGEST_CHARS]


def present_of(instance: Instance, digest: str) -> Present:
    """What is written down of an instance."""
    return Present(
        instance.name,
        instance.incarnation,
        instance.pool,
        instance.address,
        instance.host,
        instance.directory,
        instance.kind,
        digest,
    )


def registrations(texts: Mapping[str, str], manifest: Manifest) -> list[Register]:
    """What instances would say that others have written down, by name. What is no such thing, or of another
    manifest, is left out."""
    digest, found = digest_of(manifest), []
    for name, text in sorted(texts.items()):
        try:
            here = of_text(Present, text)
        except BadMessage:
            continue
        if here.manifest == digest and here.instance == name:
            identity = (here.instance, here.incarnation, here.pool, here.address, here.host)
            found.append(Register(*identity, manifest, here.directory, here.kind))
    return found


def to_text(message: Message) -> str:
    """A message as JSON: operators read it too."""
    return json.dumps(unpack_plain(pack(message)), sort_keys=True)


def of_text(kind: type[M], text: str) -> M:
    """What `to_text` made. Raises BadMessage."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    return build(kind, value)
