"""Which instances fail what they are given, and are left alone for a while. Pure.

    well ── FAILURES_MAX in a row ──> ejected ── out_s later ──> probed, by one request at a time
      ^                                  ^                          │
      └───────── it succeeds ────────────┼──────────────────────────┤
                                         └── it fails: out_s doubles ┘

What the client did wrong, and what an instance refuses because it is full, says nothing of its health: the caller
tells failures from those. One whose connection breaks is out of the view besides, until it registers again.
"""

from collections import OrderedDict
from dataclasses import dataclass

from protocol.ids import Incarnation

FAILURES_MAX = 3
"""In a row, each begun after the one before: fewer may be a bad prompt, or one accident of many requests."""

OUT_S, OUT_S_MAX = 5.0, 60.0
"""How long an instance is left alone at first, and at most: a restart takes seconds; and a probe costs one request
some time, so even one that is broken for good is tried once a minute."""

RECORDS_MAX = 1024
"""Lives of instances whose failures are remembered; far more than live at once."""


@dataclass
class _Record:
    failures: int = 0
    """In a row."""
    failed_at: float = 0.0
    """When it was last found to fail."""
    out_s: float = 0.0
    """How long it was left alone the last time."""
    out_until: float = 0.0


class Health:
    """The failures of each life of an instance. Mutates: failed, succeeded."""

    def __init__(self) -> None:
        self._records: OrderedDict[Incarnation, _Record] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether anybody has failed lately."""
        return bool(self._records)

    def failed(self, life: Incarnation, began_at: float, now: float) -> bool:
        """It failed what was begun at `began_at`. True: it is ejected for that.

        What began before it was last found to fail is the same trouble: many requests at once count as one."""
        record = self._records.setdefault(life, _Record(failed_at=began_at))
        if began_at < record.failed_at:
            return False
        self._records.move_to_end(life)
        if len(self._records) > RECORDS_MAX:
            self._records.popitem(last=False)
        record.failures, record.failed_at = record.failures + 1, now
        if record.failures < FAILURES_MAX:
            return False
        record.out_s = min(max(2 * record.out_s, OUT_S), OUT_S_MAX)
        record.out_until = now + record.out_s
        return True

    def succeeded(self, life: Incarnation, began_at: float) -> None:
        """It did what was begun at `began_at`: if that was after its last failure, all is forgiven."""
        record = self._records.get(life)
        if record is not None and began_at >= record.failed_at:
            del self._records[life]

    def ejected(self, life: Incarnation) -> bool:
        """Whether it has failed too often, and has not succeeded since."""
        record = self._records.get(life)
        return record is not None and record.failures >= FAILURES_MAX

    def takes(self, life: Incarnation, now: float, *, idle: bool) -> bool:
        """Whether it may be given work: it is well, or it is time for a probe and nothing is there (`idle`)."""
        return not self.ejected(life) or (idle and now >= self._records[life].out_until)
