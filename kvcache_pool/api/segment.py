"""Messages of a segment: one layer of some of its slots."""

from protocol.message import Message


class ReadLayer(Message):
    """One layer of these slots. Answered by Runs, one buffer a slot."""

    layer: int
    slots: list[int]
    generations: list[int]


class Runs(Message):
    """The buffers beside this message hold one run each, in the order asked for."""

    valid: int
    """How many had the right generation before the first that had not; only these are sent."""
    checksums: list[int]
    """As they were stored: the reader verifies what arrived."""
    reason: str = ""
    """What was wrong with the first bad one."""


class WriteLayer(Message):
    """Write one layer of these slots from the buffers beside this message. Answered by Done; or Stale, Corrupt."""

    layer: int
    slots: list[int]
    generations: list[int]
    checksums: list[int]
    """By the writer: a page that was reused while its frame was under way is found out."""


class OpenStream(Message):
    """Where does the segment take streams of KV? Answered by StreamPort; or an error where it takes none."""


class StreamPort(Message):
    """A port of the host that the service is at, for connections as `kvcache_pool/transfer/wire.py` says."""

    port: int
    token: bytes
    """To be shown there: who reaches the service may use the port, and nobody else."""
