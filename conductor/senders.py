"""How fast segments send. Pure."""

from collections import OrderedDict
from dataclasses import dataclass

from protocol.ids import SegmentId

TRANSFER_BYTES_S = 12.5e9
"""Assumed of a segment from which nothing was fetched lately: 100 Gbit/s. Rather too fast than too slow, since the
first fetch corrects the one; the other would keep every fetch off, and with it the measurement."""

DOUBT_BYTES = 1 << 20
"""The assumed rate weighs as much as so many measured bytes: a first small transfer is not believed blindly."""

MEMORY = 0.8
"""What earlier transfers weigh when one more is measured: about five are remembered."""

HALF_LIFE_S = 60.0
"""What was measured weighs half after this time, so a sender that was slow once is tried again."""

SENDERS_MAX = 1024
"""Segments whose rate is remembered; far more than live at once."""

SECONDS_MIN = 1e-6
"""A clock may not have moved during a very short transfer."""


@dataclass
class Sent:
    """What was measured of one sender, faded: bytes, and the seconds they took."""

    bytes_: float = 0.0
    seconds: float = 0.0
    at: float = 0.0
    """When the last was measured."""


class Senders:
    """Rates by segment: a moving mean of seconds a byte, in which large transfers weigh more. Mutates: learn."""

    def __init__(self) -> None:
        self.now = 0.0
        """The latest time heard of; what was measured fades towards the assumed rate until then."""
        self._sent: OrderedDict[SegmentId, Sent] = OrderedDict()

    def learn(self, source: SegmentId, bytes_: int, seconds: float, now: float) -> None:
        """`source` sent `bytes_` in `seconds`."""
        if bytes_ <= 0 or not 0.0 <= seconds < float("inf"):
            return
        self.now = max(self.now, now)
        sent = self._sent.setdefault(source, Sent(at=now))
        weight = MEMORY * self._weight(sent)
        sent.bytes_ = weight * sent.bytes_ + bytes_
        sent.seconds = weight * sent.seconds + max(seconds, SECONDS_MIN)
        sent.at = self.now
        self._sent.move_to_end(source)
        if len(self._sent) > SENDERS_MAX:
            self._sent.popitem(last=False)

    def transfer_s(self, source: SegmentId, bytes_: int, in_flight: int) -> float:
        """For `bytes_` that are sent after the `in_flight` which the source has to send already."""
        sent = self._sent.get(source)
        byte_s = 1.0 / TRANSFER_BYTES_S
        if sent is not None:
            weight = self._weight(sent)
            doubt_s = DOUBT_BYTES / TRANSFER_BYTES_S
            byte_s = (weight * sent.seconds + doubt_s) / (weight * sent.bytes_ + DOUBT_BYTES)
        return (in_flight + bytes_) * byte_s

    def _weight(self, sent: Sent) -> float:
        return float(0.5 ** ((self.now - sent.at) / HALF_LIFE_S))
