"""Which blocks of a segment are pinned, how, and until when. Pure."""

import heapq

from kvcache_pool.api import PinKind

PIN_S_MAX = 86_400.0
"""A day: who wants a block for longer pins it again, or is gone."""


class Pins:
    """The pins of one segment's blocks, by their slots.

    Always: at most `hard_max` are hard, so that a segment cannot be pinned shut. Mutates: put, drop, over.
    """

    def __init__(self, hard_max: int) -> None:
        self._hard_max = hard_max
        self._pins: dict[int, tuple[PinKind, float, int]] = {}
        self._hard = 0
        self._put = 0
        self._ends: list[
            tuple[float, int, int]
        ] = []  # a heap, also of pins that are gone; the last put comes first

    def __len__(self) -> int:
        return len(self._pins)

    def kind(self, slot: int) -> PinKind | None:
        """How this block is pinned, if it is."""
        pin = self._pins.get(slot)
        return None if pin is None else pin[0]

    def get(self, slot: int) -> tuple[PinKind, float] | None:
        """How this block is pinned, and until when."""
        pin = self._pins.get(slot)
        return None if pin is None else pin[:2]

    @property
    def hard_room(self) -> int:
        """How many more may be hard."""
        return max(0, self._hard_max - self._hard)

    def put(self, slot: int, kind: PinKind, end: float) -> bool:
        """Pin a block, in place of what pin it had. False, and nothing changes, if that were a hard one too
        many."""
        hard = self._hard - (self.kind(slot) is PinKind.HARD) + (kind is PinKind.HARD)
        if hard > max(self._hard, self._hard_max):
            return False
        self._hard = hard
        self._put += 1
        self._pins[slot] = kind, end, self._put
        heapq.heappush(self._ends, (end, -self._put, slot))
        if len(self._ends) > 2 * len(self._pins) + 64:
            self._ends = [(end, -number, slot) for slot, (_, end, number) in self._pins.items()]
            heapq.heapify(self._ends)
        return True

    def drop(self, slot: int) -> bool:
        """End a pin. False if there was none."""
        pin = self._pins.pop(slot, None)
        self._hard -= pin is not None and pin[0] is PinKind.HARD
        return pin is not None

    def over(self, now: float) -> list[int]:
        """Take out the pins whose time is over; returns their slots. Of those that end at the same time the last
        one put comes first."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            _, number, slot = heapq.heappop(self._ends)
            pin = self._pins.get(slot)
            if pin is not None and pin[2] == -number:
                self.drop(slot)
                ended.append(slot)
        return ended

    def check(self) -> None:
        """Asserts that the hard ones are counted and few enough, and that each pin will end."""
        assert self._hard == sum(kind is PinKind.HARD for kind, _, _ in self._pins.values()) <= self._hard_max
        assert {(end, -number, slot) for slot, (_, end, number) in self._pins.items()} <= set(self._ends)
