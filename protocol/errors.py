"""The exceptions that cross a process border, one small tree.

DangoError
├── BadMessage          what arrived is no message of ours; it is dropped and counted
├── PeerLost            the process at the other end went away, or never answered a heartbeat
│   └── BadAddress      nobody can be there: it is no address
├── DeadlineExceeded    the caller's time ran out
└── RemoteError         the callee refuses or fails, in its own words; `kind` travels
    └── ...             each `api.py` declares the kinds that its callers must tell apart
"""

from typing import ClassVar


class DangoError(Exception):
    """Root of all errors that callers of another process may have to handle."""


class BadMessage(DangoError):
    """Bytes that do not decode to a message, or to one of the wrong shape."""


class PeerLost(DangoError):
    """The connection to a peer broke; calls in flight have no answer and may or may not have run."""


class BadAddress(PeerLost):
    """What should say where a peer is, is no address. To try again is of no use."""


class DeadlineExceeded(DangoError):
    """The time that the caller gave is over."""


class RemoteError(DangoError):
    """An error that the callee raised and the caller receives as the same class.

    A subclass names itself by `kind`; an unknown kind arrives as `RemoteError`, its text kept.
    """

    kind: ClassVar[str] = "error"
    kinds: ClassVar[dict[str, type["RemoteError"]]] = {}

    def __init_subclass__(cls) -> None:
        assert cls.kind not in RemoteError.kinds, f"two errors of kind {cls.kind}"
        RemoteError.kinds[cls.kind] = cls

    @staticmethod
    def of(kind: str, text: str) -> "RemoteError":
        """The exception that `kind` stands for, carrying the callee's text."""
        return RemoteError.kinds.get(kind, RemoteError)(text)


class Broken(RemoteError):
    """Something went wrong inside the callee; its log says what. Another may well succeed."""

    kind = "broken"


class Abandoned(RemoteError):
    """The callee heard nothing of its caller for too long, or past the deadline, and stopped working for it."""

    kind = "abandoned"
