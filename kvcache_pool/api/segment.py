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


class OpenMooncake(Message):
    """Where does Mooncake's Transfer Engine find the segment's runs? Answered by MooncakeAt; or an error where it
    does not."""


class MooncakeAt(Message):
    """Runs in memory that may be read from elsewhere."""

    session: str
    """What the engine of their process is called by."""
    address: int
    """Of the first run of slot 0, in that process; where the others lie follows from the layout."""
    protocol: str
    """tcp or rdma."""


class GetChecksums(Message):
    """Of some neighbouring layers of these slots, as they were stored. Answered by Checksums."""

    first: int
    width: int
    slots: list[int]
    generations: list[int]


class Checksums(Message):
    """What bytes that came without their checksums are compared with."""

    valid: int
    """How many had the right generation before the first that had not; only of these are there checksums."""
    checksums: list[int]
    """`width` for each, in the order of the layers."""


class PullRuns(Message):
    """Read these runs out of the writer's memory, one after another, and write them to these slots. Answered by
    Done; or Stale, Corrupt, or an error where that memory cannot be read."""

    session: str
    """What the engine of the writer's process is called by."""
    address: int
    first: int
    width: int
    slots: list[int]
    generations: list[int]
    checksums: list[int]
    """`width` for each slot, by the writer."""
