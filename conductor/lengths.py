"""How long answers become, learnt from those that ended. Pure.

An empirical distribution in slots, from which old answers fade: half of their weight is gone after
HALF_LIFE further ones. What a running answer's length will be, given how far it has come, is read off
its tail:

    P(L > x) 1 ┤▔▔╲                    up to `end`: the product-limit estimate (Kaplan and Meier, 1958),
               │    ╲__                which also learns from answers that were cancelled: they would
               │       ╲___            have become longer than they are
               │           ╲_ _ _ _    from `end` on, where less than TAIL_SAMPLES are left:
             0 ┼────────────┬──────>   their mean hazard goes on, so nothing is ever certain to end
               0           end   x
"""

from math import exp, log
from statistics import NormalDist

from conductor.ask import Priority

LENGTH_MAX = 1 << 20
"""Tokens of the longest answer that is told from a longer one; no model's context is longer."""

SUBSLOTS_BITS = 5
SUBSLOTS = 1 << SUBSLOTS_BITS
"""Slots in each power of two: lengths are exact up to twice this, and within 1.6 to 3.1 percent beyond."""

HALF_LIFE = 1000.0
"""Answers after which one counts half: 1,443 count in all: enough for a tail, and shifts are followed."""

GROWTH = 2.0 ** (1.0 / HALF_LIFE)
"""Weights grow by this from one answer to the next, which is the same as all the older ones fading."""

GRAIN_MAX = 1e12
"""When a new answer weighs this much, all weights are scaled down, long before a float runs out of range."""

SAMPLES_MIN = 100.0
"""Weight, in answers, of a distribution that is believed: its quartiles are good to 5 percent points then."""

TAIL_SAMPLES = 10.0
"""Weight, in answers, of what is left where the constant hazard takes over: fewer make a jagged estimate."""

REBUILD_SHARE = 0.01
"""A tail is computed anew when this share of its samples is new; one answer more hardly moves it."""

PRIOR_MEDIAN, PRIOR_SIGMA = 182.0, 1.0
"""Before there are samples: log-normal, of mean 300 tokens. Chat answers in public traces average 180 to 350, and
their logarithm spreads by about this."""


def slot_of(tokens: int) -> int:
    """The slot that holds lengths from `tokens` on: linear at first, then SUBSLOTS for each power of two."""
    shift = tokens.bit_length() - SUBSLOTS_BITS - 1
    return tokens if shift <= 0 else (shift << SUBSLOTS_BITS) + (tokens >> shift)


def _start_of(slot: int) -> int:
    shift = max((slot >> SUBSLOTS_BITS) - 1, 0)
    return (slot - (shift << SUBSLOTS_BITS)) << shift


SLOTS = slot_of(LENGTH_MAX)
STARTS = tuple(_start_of(slot) for slot in range(SLOTS + 1))
"""Slot i holds the lengths above STARTS[i], up to and with STARTS[i + 1]."""

TABLE_TOKENS = 4096
"""Most answers are shorter."""

SLOT_OF = tuple(slot_of(tokens) for tokens in range(TABLE_TOKENS))


class Tail:
    """P(length > x), piecewise linear up to `end` and exponential beyond."""

    def __init__(self, above: list[float], hazard: float) -> None:
        """`above[i]`: P(length > STARTS[i]), falling from 1, the last one above 0; `hazard` a token after it."""
        self._above = above
        self._end = STARTS[len(above) - 1]
        self._hazard = hazard
        self._falls = [(above[i] - above[i + 1]) / (STARTS[i + 1] - STARTS[i]) for i in range(len(above) - 1)]
        area = above[-1] / hazard
        self._areas = [area]
        for i in reversed(range(len(above) - 1)):
            area += (above[i] + above[i + 1]) / 2 * (STARTS[i + 1] - STARTS[i])
            self._areas.append(area)
        self._areas.reverse()

    def survives(self, said: float, more: float) -> float:
        """P(length > said + more | length > said), for `said` and `more` from 0 on.

        A decision asks this of some hundred streams, so `slot_of` is looked up where a table has it."""
        if more <= 0.0:
            return 1.0  # who is there now is there
        end = self._end
        if said >= end:
            return exp(-more * self._hazard)
        slot = SLOT_OF[int(said)] if said < TABLE_TOKENS else slot_of(int(said))
        now = self._above[slot] - (said - STARTS[slot]) * self._falls[slot]
        until = said + more
        if until >= end:
            return self._above[-1] * exp((end - until) * self._hazard) / now
        slot = SLOT_OF[int(until)] if until < TABLE_TOKENS else slot_of(int(until))
        then = (self._above[slot] - (until - STARTS[slot]) * self._falls[slot]) / now
        return then if then < 1.0 else 1.0

    def mean_left(self, said: float) -> float:
        """Tokens that are expected after `said` ones: the sum of the tail, which is its area and half a token."""
        if said >= self._end:
            return 1 / self._hazard + 0.5
        slot = slot_of(int(said))
        now = self._above[slot] - (said - STARTS[slot]) * self._falls[slot]
        rest = (now + self._above[slot + 1]) / 2 * (STARTS[slot + 1] - said)
        return (rest + self._areas[slot + 1]) / now + 0.5


class _Sample:
    """Answers of one sort, fading. Mutates: add; and `tail`, which is computed when it is asked for."""

    def __init__(self) -> None:
        self._ended = [0.0] * SLOTS
        self._cut = [0.0] * SLOTS
        """Of those that were cancelled: by how far they had come."""
        self._grain = 1.0
        """What the next answer weighs."""
        self.weight = 0.0
        """Of all, in answers."""
        self._news = 0.0
        """Answers that the tail below does not know of."""
        self._tail: Tail | None = None

    def add(self, tokens: int, *, ended: bool, weight: float = 1.0) -> None:
        """An answer that ended at, or was cut off after, so many tokens."""
        slot = slot_of(min(max(tokens - 1, 0), LENGTH_MAX - 1))
        (self._ended if ended else self._cut)[slot] += self._grain * weight
        self.weight += weight
        self._news += weight

    def fade(self) -> None:
        """One answer's time passes for all that were added."""
        self._grain *= GROWTH
        self.weight /= GROWTH
        if self._grain > GRAIN_MAX:
            self._ended = [weight / self._grain for weight in self._ended]
            self._cut = [weight / self._grain for weight in self._cut]
            self._grain = 1.0

    @property
    def tail(self) -> Tail:
        """P(length > x), at most REBUILD_SHARE of the answers old. Needs TAIL_SAMPLES of weight."""
        if self._tail is None or self._news > REBUILD_SHARE * self.weight:
            self._tail, self._news = self._build(), 0.0
        return self._tail

    def _build(self) -> Tail:
        ended, cut = self._ended, self._cut
        few, left, slot = TAIL_SAMPLES * self._grain, 0.0, SLOTS
        while left < few and slot:
            slot -= 1
            left += ended[slot] + cut[slot]
        end = slot
        went_on = sum(
            (ended[slot] + cut[slot]) * ((STARTS[slot] + STARTS[slot + 1]) / 2 - STARTS[end])
            for slot in range(end, SLOTS)
        )
        hazard = max(sum(ended[end:]), self._grain) / went_on  # at least one ends, else all would go on for ever
        for slot in range(end):
            left += ended[slot] + cut[slot]
        above = [1.0]
        for slot in range(end):
            died, lost = ended[slot], cut[slot]
            above.append(above[-1] * (1 - died / (left - lost / 2)) if died else above[-1])
            left -= died + lost
        return Tail(above, hazard)


def _prior() -> Tail:
    bell, sample, below = NormalDist(log(PRIOR_MEDIAN), PRIOR_SIGMA), _Sample(), 0.0
    for slot in range(SLOTS):
        upto = bell.cdf(log(STARTS[slot + 1]))
        sample.add(STARTS[slot + 1], ended=True, weight=(upto - below) * SAMPLES_MIN * TAIL_SAMPLES)
        below = upto
    return sample.tail


PRIOR = _prior()


class Lengths:
    """Lengths of answers: of each class when it has had enough of them, else of all, else the prior.

    Mutates: observe, censored.
    """

    def __init__(self) -> None:
        self._all = _Sample()
        self._classes = {priority.value: _Sample() for priority in Priority}

    def observe(self, priority: Priority, tokens: int) -> None:
        """An answer ended by itself, after `tokens` (at least 1)."""
        self._add(priority, tokens, ended=True)

    def censored(self, priority: Priority, said: int) -> None:
        """An answer was cut off from outside after `said` tokens: its client left, or its instance died."""
        self._add(priority, said + 1, ended=False)

    def tail(self, priority: Priority) -> Tail:
        """The distribution that a class's answers are judged by now; do not keep it."""
        for sample in (self._classes[priority.value], self._all):
            if sample.weight >= SAMPLES_MIN:
                return sample.tail
        return PRIOR

    def mean(self, priority: Priority) -> float:
        """Tokens of an answer that has not begun."""
        return self.tail(priority).mean_left(0.0)

    def _add(self, priority: Priority, tokens: int, *, ended: bool) -> None:
        for sample in (self._classes[priority.value], self._all):
            sample.fade()
            sample.add(tokens, ended=ended)
