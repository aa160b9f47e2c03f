"""Who will be on a decode instance at a later moment, and what a step will take then. Pure.

Each stream of the ledger is there with a probability p, its *presence*. With the step line of
`estimate`, step_s = base_s + row_s * batch + token_s * context, and the sums over the streams:

    step_s = base_s + sum p (row_s + token_s c) + z sqrt(sum p (1 - p) (row_s + token_s c)^2) + the candidate's

where c is a stream's context by then. Streams end independently of each other, so the variances add up.
Memory is foretold by the same sums over c alone. Progress is taken at the pace that the instance reported,
not at the one foretold: so another stream, or a longer one, never makes a forecast better.

What is promised to those who come later must hold too. With a *reserve* the worst of several moments counts: the
hand-over of the candidate, and later ones at which others are due, when it may have ended and left its room.

    now      hand-over     +2 s       +4 s                +8 s
    ├────────────┼──────────┼──────────┼───────────────────┼──>   who is due in a span counts as there from
                      due        -           due   due            its start on; where nobody is due, nobody looks
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from conductor.ask import Priority
from conductor.estimate import Estimates, StepLine
from conductor.lengths import Tail
from conductor.view import STALE_REPORTS, Instance, Stream
from protocol.registry import REPORT_EVERY_S

CANDIDATES_MAX = 8
"""Exact forecasts in one decision. Those that a rough sum ranks below the eighth do not win in the exact one."""

PAGES_EACH = 1.5
"""Pages of a sequence beyond its tokens: its last one is half empty on average, and a decode instance keeps one
free for each, so that nobody is preempted for the next."""

LATER_S = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds after a hand-over at which spans begin: the farther away, the less it matters when exactly."""

PROMISED = 0.1
"""A stream that is likelier there than this is owed the time between tokens that it was promised."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A later moment on one instance, and what a presence is worked out from."""

    now: float
    at: float
    """The moment, not before `now`."""
    tokens_s: float
    """Tokens a second that each stream there advances."""
    interactive: Tail
    """Lengths of the answers of that class."""
    batch: Tail
    residence_s: float
    """How long an answer is taken to stay, where all are taken to stay equally long."""


Presence = Callable[[Stream, Moment], float]
"""The probability that a stream is in the batch at a moment."""


def at_decode(stream: Stream, moment: Moment) -> float:
    """Who runs now, and who was handed over a moment ago and is about to. No forecast."""
    return 1.0 if stream.joined_at is not None or stream.handed_over else 0.0


def early(stream: Stream, moment: Moment) -> float:
    """Who runs now: early rejection by the present load (the Mooncake report, "early rejection"). Nobody is
    expected to end; with a reserve, which looks at later moments, those who are due by then have come."""
    return 1.0 if stream.joined_at is not None or max(stream.due_at, moment.now) < moment.at else 0.0


def predictive(stream: Stream, moment: Moment) -> float:
    """All stay for `residence_s` (the report's t_d, "early rejection based on prediction")."""
    starts = max(stream.due_at, moment.now) if stream.joined_at is None else stream.joined_at
    return 1.0 if starts <= moment.at < starts + moment.residence_s else 0.0


def survival(stream: Stream, moment: Moment) -> float:
    """The share of the answers as long as this one that go on until then."""
    tail = moment.interactive if stream.priority is Priority.INTERACTIVE else moment.batch
    if stream.joined_at is not None:
        # Tokens are heard of in bunches: those since the last one count as said.
        said = stream.said + max(moment.now - stream.said_at, 0.0) * moment.tokens_s
        return tail.survives(said, (moment.at - moment.now) * moment.tokens_s)
    starts = max(stream.due_at, moment.now)
    return tail.survives(0.0, (moment.at - starts) * moment.tokens_s) if starts <= moment.at else 0.0


PRESENCES: Mapping[str, Presence] = MappingProxyType(
    {presence.__name__: presence for presence in (at_decode, early, predictive, survival)}
)
"""By the name of the admission policy that looks ahead so."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One decode instance with the candidate in its batch, at the moment at which it is worst."""

    instance: Instance
    step_s: float
    """What a step takes, at the longest."""
    batch: float
    """Sequences expected, at the most."""
    room_share: float
    """Of its pages, or of the rows of its batch if these are scarcer, so much is needed at the most; 0 while it
    has not said how many it has."""
    promised_s: float
    """The strictest time between tokens that was promised to others there; infinite if none was."""
    alone: bool
    """Whether nobody else is expected there."""

    @property
    def fits(self) -> bool:
        """Whether its memory and its batch are large enough."""
        return self.room_share <= 1.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one decision asks of each instance: who will be there at `at`, besides a candidate?"""

    now: float
    at: float
    presence: Presence
    interactive: Tail
    batch: Tail
    context: float
    """Tokens of the candidate's prompt."""
    growth: float
    """Tokens that each of its answers is expected to add."""
    block_tokens: int
    """Tokens of one page."""
    priority: Priority = Priority.INTERACTIVE
    """The candidate's."""
    choices: int = 1
    """Answers that it asks for: as many sequences."""
    reserve: bool = False
    """Whether later moments count, at which others are due: what is promised to them must hold."""
    z: float = 0.0
    """Standard deviations that are added to what is expected."""
    residence_s: float = math.inf
    stale_s: float = STALE_REPORTS * REPORT_EVERY_S
    """A report older than this says nothing."""

    def of(self, instance: Instance, line: StepLine) -> Forecast:
        """The forecast for one instance."""
        return self._look(instance, line).to_the_end()

    def _look(self, instance: Instance, line: StepLine) -> "_Look":
        """The same, as far as the first span tells."""
        tokens_s = _pace(instance, line)
        spans = self._spans(instance) if self.reserve else [(self.at, self.at)]
        during = (self._during(instance, line, tokens_s, start, until) for start, until in spans)
        return _Look(next(during), during)

    def _spans(self, instance: Instance) -> list[tuple[float, float]]:
        """Start and end of the first span, from the hand-over on, and of each later one in which one is due."""
        after = [stream.due_at - self.at for stream in instance.streams.values() if stream.joined_at is None]
        spans = {bisect_right(LATER_S, late_s) - 1 for late_s in after if late_s > 0.0} | {0}
        ends = (*LATER_S[1:], math.inf)
        return [(self.at + LATER_S[span], self.at + ends[span]) for span in sorted(spans)]

    def _during(self, instance: Instance, line: StepLine, tokens_s: float, start: float, until: float) -> Forecast:
        """At the start of a span; who is due before its end is there already."""
        moment = Moment(self.now, start, tokens_s, self.interactive, self.batch, self.residence_s)
        rows, tokens, variance, tokens_variance, promised_s = self._sums(instance, line, moment, until)
        if instance.foreign and self.now - instance.reported_at <= self.stale_s:
            rows += instance.foreign
            tokens += instance.foreign * instance.load.context_tokens / max(instance.load.running, 1)
        alone = rows == 0.0
        more = (start - self.at) * tokens_s
        tail = self.interactive if self.priority is Priority.INTERACTIVE else self.batch
        share = tail.survives(0.0, more) if more else 1.0
        own, doubt = self.context + more, self.choices * share * (1.0 - share)
        rows, tokens = rows + share * self.choices, tokens + share * self.choices * own
        variance += doubt * (line.row_s + line.token_s * own) ** 2
        tokens_variance += doubt * own * own
        memory = tokens + share * self.choices * self.growth + self.z * math.sqrt(tokens_variance)
        memory += PAGES_EACH * rows * self.block_tokens
        load = instance.load
        shares = ((memory, load.blocks_total * self.block_tokens), (rows, load.rows_max))
        return Forecast(
            instance=instance,
            step_s=line.at(rows, tokens) + self._rest_s(instance, start) + self.z * math.sqrt(variance),
            batch=rows,
            room_share=max([needed / there for needed, there in shares if there], default=0.0),
            promised_s=promised_s,
            alone=alone,
        )

    def _sums(
        self, instance: Instance, line: StepLine, moment: Moment, until: float
    ) -> tuple[float, float, float, float, float]:
        """Over the ledger's streams: expected rows and context, the variances of step time and of context, and
        the strictest promise. A hot loop: 64 instances of 40 streams are looked at within half a millisecond."""
        now, at, tokens_s = self.now, moment.at, moment.tokens_s
        presence, row_s, token_s = self.presence, line.row_s, line.token_s
        rows = tokens = variance = tokens_variance = 0.0
        promised_s = math.inf
        for stream in instance.streams.values():
            if stream.joined_at is not None:
                since = stream.said_at
                share = presence(stream, moment)
            else:
                since = stream.due_at if stream.due_at > now else now
                share = 1.0 if at <= since < until else presence(stream, moment)
            if share <= 0.0:
                continue
            context: float = stream.context + stream.said
            if at > since:
                context += (at - since) * tokens_s
            rows += share
            tokens += share * context
            if share < 1.0:
                doubt, row = share * (1.0 - share), row_s + token_s * context
                variance += doubt * row * row
                tokens_variance += doubt * context * context
            if stream.tbt_s < promised_s and share > PROMISED:
                promised_s = stream.tbt_s
        return rows, tokens, variance, tokens_variance, promised_s

    def _rest_s(self, instance: Instance, at: float) -> float:
        """What a step takes longer for a prompt of which this instance computes a part until then or later; one
        that is late is taken to be done in a moment."""
        due = [one for one in instance.streams.values() if one.rest_s and not one.said]
        return sum([one.rest_s for one in due if max(one.due_at, self.now) >= at])

    def rank(self, instances: Iterable[Instance], estimates: Estimates) -> "Ranking":
        """The best CANDIDATES_MAX instances: those with room first, of these the shortest step, then by
        name. More instances than that are looked at roughly first: as if everybody stayed, and nobody grew."""
        lines: dict[str, StepLine] = {}
        rough = []
        for instance in instances:
            line = lines.get(instance.kind)
            if line is None:
                line = lines[instance.kind] = estimates.step(instance.kind)
            rough.append((instance, line))
        if len(rough) > CANDIDATES_MAX:
            rough = sorted(rough, key=_rough)[:CANDIDATES_MAX]
        return Ranking(self._look(instance, line) for instance, line in rough)


@dataclass(slots=True)
class _Look:
    """At one instance: the worst so far, and the spans that were not looked at yet. They never make it better."""

    worst: Forecast
    later: Iterator[Forecast]
    ended: bool = False

    def to_the_end(self) -> Forecast:
        """With all spans."""
        for other in self.later:
            self.worst = _worse(self.worst, other)
        self.ended = True
        return self.worst


class Ranking:
    """Forecasts of several instances, best first.

    Most decisions take the first. So later spans of an instance are looked at when it is the best by what is known
    of all; another may be better then. What was found is kept: iterate as often as you like. Mutates: iteration.
    """

    def __init__(self, looks: Iterable[_Look]) -> None:
        self._found: list[Forecast] = []
        self._looks = [(not look.worst.fits, look.worst.step_s, look.worst.instance.name, look) for look in looks]
        heapify(self._looks)

    def __iter__(self) -> Iterator[Forecast]:
        index = 0
        while index < len(self._found) or self._looks:
            while index == len(self._found):
                self._go_on()
            yield self._found[index]
            index += 1

    def _go_on(self) -> None:
        """Find one more, or learn more of the one that seemed best."""
        _, _, name, look = heappop(self._looks)
        if look.ended:
            self._found.append(look.worst)
        else:
            worst = look.to_the_end()
            heappush(self._looks, (not worst.fits, worst.step_s, name, look))


def _rough(candidate: tuple[Instance, StepLine]) -> tuple[float, str]:
    instance, line = candidate
    streams = instance.streams
    context = sum([stream.context for stream in streams.values()])
    return line.base_s + line.row_s * len(streams) + line.token_s * context, instance.name


def _worse(one: Forecast, other: Forecast) -> Forecast:
    """Both moments' troubles in one."""
    return Forecast(
        instance=one.instance,
        step_s=max(one.step_s, other.step_s),
        batch=max(one.batch, other.batch),
        room_share=max(one.room_share, other.room_share),
        promised_s=min(one.promised_s, other.promised_s),
        alone=one.alone and other.alone,
    )


def _pace(instance: Instance, line: StepLine) -> float:
    """Tokens a second of each stream there; of one that has not stepped yet, as if it had one. 0: unknown."""
    step_s = instance.load.step_s or line.base_s + line.row_s
    return 1.0 / step_s if step_s > 0.0 else 0.0
