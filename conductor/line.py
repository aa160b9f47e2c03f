"""The line: requests that are held before their prefill, in the order in which they are tried. Pure.

    first                                                                          last
    [ interactive, and batch that has waited long | batch ]   in each: earliest due first
                      ▲
                      a barrier: it was overtaken so often that nobody behind it may go before it

A request is due when its client's limit ends and, besides, the time of a prefill of its whole prompt, up to a
bound: about the order in which requests of equal limits would reach decode if none had to wait. So a long prompt
is behind the short ones that come within that time, and before all that come later.

A request is judged when it arrives and again whenever something has changed. One that fits may pass those before
it that do not. It may do so only so often, or long prompts would starve behind short ones.

Where all wait for most of their limit, a prompt whose own prefill takes much of it never has its turn in time. So
when its last moment to begin has come it may be *rescued*: tried before all others, past every barrier. That is
paid for: its tokens are a debt of the line, which a share of the tokens of all others pays off, and while there is
a debt nobody is rescued.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from conductor.admitted import Wanted
from conductor.ask import Limits, Priority
from conductor.place import Placement
from protocol.ids import RequestId

PATIENCE_AGES = 2.0
"""A request is due after so many times the age of ageing at the latest, whatever its limit: those that arrive
later come after it, so that one with a far deadline does not stand behind newcomers with near ones for ever."""

BEHIND_SHARE = 0.25
"""A long prompt stands behind later ones that are shorter, but not farther than this share of its limit: its own
prefill leaves it little time to wait, and without a bound the longest are hardly ever served under overload."""

LONG_SHARE = 0.4
"""A prompt whose prefill takes more than this share of its limit may be rescued: under overload, where others wait
for most of theirs, it has its turn in time no other way."""

LAST_CALL_S = 2.0
"""A prompt's last moment to begin comes so long before its predicted prefill would end too late: time for some
tries, and for the queue to be a little longer than predicted."""

FRONT, BACK = 0, 1
"""The two ranks: interactive and aged batch; batch."""

Entry = tuple[int, float, int, "Held"]
"""Rank, when it is due, the number of its arrival in this line (which no other has), and who."""


@dataclass(eq=False, slots=True)
class Held:
    """One request in the line."""

    key: RequestId
    priority: Priority
    tokens: int
    """Of its prompt."""
    arrived_at: float
    """When its client asked."""
    due: float
    """The earlier, the sooner it is tried."""
    deadline: float
    """When its hold must end. Finite, since one that never fits must not bar the line for ever."""
    bars: bool = True
    """Whether it becomes a barrier. One that asks for more than others are given may be passed as often as it
    takes: a single client's strict limit must not stop all others."""
    rescue_at: float = math.inf
    """From when on it may be rescued; infinite for a prompt that has its turn in time as well as others."""
    overtaken: int = 0
    """So many have passed it."""


def may_bar(limits: Limits, usual: Limits) -> bool:
    """Whether one that does not fit may make others wait: not if it asks for more than they are given."""
    return limits.tbt_s >= usual.tbt_s


def held_of(wanted: Wanted, plan: Placement, whole_s: float, usual: Limits) -> Held:
    """A request that would go to prefill as `plan` says. `whole_s` is the predicted prefill of its whole prompt,
    cached or not: its place goes by that, since decode needs room for all of it. Who asks for more than the
    `usual` limits neither bars others nor is rescued for that."""
    limit_s, arrived_at = wanted.limits.ttft_s, wanted.arrived_at
    ends_at = min(arrived_at + limit_s, wanted.ends_at)
    last_call = ends_at - plan.queue_s - plan.work_s - LAST_CALL_S
    return Held(
        key=wanted.request,
        priority=wanted.priority,
        tokens=wanted.prompt.tokens,
        arrived_at=arrived_at,
        due=ends_at + min(whole_s, BEHIND_SHARE * limit_s),
        deadline=ends_at,
        bars=may_bar(wanted.limits, usual),
        rescue_at=last_call if whole_s > LONG_SHARE * max(limit_s, usual.ttft_s) else math.inf,
    )


class Line:
    """All held requests. Owns the order, and both sums that bound it.

    Always: sorted; at most `held_max` requests and `tokens_max` prompt tokens; nobody who bars is overtaken more
    than `overtaken_max` times, but by the rescued. Of all admitted tokens not more than `rescue_share` and one
    prompt are of the rescued. Mutates: add, admitted, remove, expired; and each method that takes the time lets
    batch requests age up to it.
    """

    def __init__(
        self, *, held_max: int, tokens_max: int, overtaken_max: int, age_s: float, rescue_share: float = 0.0
    ) -> None:
        self._held_max = held_max
        self._tokens_max = tokens_max
        self._overtaken_max = overtaken_max
        self._age_s = age_s
        self._order: list[Entry] = []
        self._entries: dict[RequestId, Entry] = {}
        self._barrier: Entry | None = None  # the first that was overtaken as often as may be
        self._ages_at = math.inf  # no batch request comes to the front before
        self._arrivals = 0
        self._tokens = 0
        self._rescue_share = rescue_share
        self._debt = 0.0  # tokens of the rescued that others have not made up for

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: RequestId) -> bool:
        return key in self._entries

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that are held."""
        return self._tokens

    @property
    def classes(self) -> set[Priority]:
        """Of those that are held."""
        return {entry[-1].priority for entry in self._order}

    def add(self, held: Held, now: float) -> list[Held] | None:
        """Let one in; returns whom it pushed out: if it is interactive and the line is full, batch requests that
        stood last. None: there is no room for it, and nothing has changed.
        """
        assert held.key not in self._entries, f"{held.key} is held already"
        self._age(now)
        pushed = self._to_push(held)
        if pushed is None:
            return None
        for other in pushed:
            self._drop(self._entries[other.key])
        self._insert(self._entry(held, now))
        self._arrivals += 1
        return pushed

    def may_pass(self, newcomer: Held, now: float) -> bool:
        """Whether one that is not held may be judged at once. If not, it must queue behind a barrier."""
        self._age(now)
        entry = self._entry(newcomer, now)
        return self._barrier is None or entry < self._barrier or self._may_rescue(entry, now)

    def yields(self, held: Held, now: float) -> bool:
        """Whether interactive requests go before this one: it is batch, and has not waited for long."""
        return self._entry(held, now)[0] == BACK

    def candidates(self, now: float) -> Iterator[Held]:
        """Those that may be judged: who may be rescued, then all in order, down to a barrier. The line may change
        while this goes on: who has left is passed over, and an admission that makes a barrier ends it there.
        """
        self._age(now)
        order, tried = list(self._order), set[RequestId]()
        for entry in order:
            held = entry[-1]
            if self._may_rescue(entry, now) and self._entries.get(held.key) is entry:
                tried.add(held.key)
                yield held
        for entry in order:
            held = entry[-1]
            if self._barrier is not None and entry > self._barrier:
                return
            if held.key not in tried and self._entries.get(held.key) is entry:
                yield held

    def admitted(self, held: Held, now: float) -> None:
        """One goes to its prefill, from the line or straight past it: all that stand before it were overtaken, or
        the line has a debt."""
        self._age(now)
        entry = self._entries.get(held.key) or self._entry(held, now)
        if self._barrier is None or entry <= self._barrier:
            self._debt = max(self._debt - self._rescue_share * held.tokens, 0.0)
            for passed in self._order[: bisect_left(self._order, entry)]:
                passed[-1].overtaken += 1
        else:
            assert self._may_rescue(entry, now), f"{held.key} went past a barrier"
            self._debt += held.tokens
        if held.key in self._entries:
            self._drop(entry)
        self._find_barrier()

    def remove(self, key: RequestId) -> Held | None:
        """One leaves without having been admitted; None if it is not held."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._drop(entry)
        return entry[-1]

    def expired(self, now: float) -> list[Held]:
        """Take out those whose hold must end now, in order."""
        over = [held for _, _, _, held in self._order if held.deadline <= now]
        for held in over:
            self._drop(self._entries[held.key])
        return over

    def check(self) -> None:
        """Asserts what always holds."""
        assert self._order == sorted(self._order)
        assert {entry[-1].key: entry for entry in self._order} == self._entries
        assert len(self._order) == len(self._entries) <= self._held_max
        assert self._tokens == sum(entry[-1].tokens for entry in self._order) <= self._tokens_max
        barriers = [entry for entry in self._order if self._is_barrier(entry[-1])]
        assert all(entry[-1].overtaken <= self._overtaken_max for entry in self._order if entry[-1].bars)
        ages = [entry[-1].arrived_at + self._age_s for entry in self._order if entry[0] == BACK]
        assert self._ages_at <= min(ages, default=math.inf)
        assert self._barrier is (barriers[0] if barriers else None)

    # --- the order

    def _entry(self, held: Held, now: float) -> Entry:
        waits = held.priority is Priority.BATCH and held.arrived_at + self._age_s > now
        due = min(held.due, held.arrived_at + PATIENCE_AGES * self._age_s)
        return (BACK if waits else FRONT, due, self._arrivals, held)

    def _may_rescue(self, entry: Entry, now: float) -> bool:
        affordable = self._rescue_share > 0.0 and self._debt <= 0.0
        return affordable and entry[0] == FRONT and entry[-1].rescue_at <= now

    def _age(self, now: float) -> None:
        """Moves batch requests that have waited long enough to the front."""
        if now < self._ages_at:
            return
        self._ages_at = math.inf
        for entry in self._order[bisect_left(self._order, (BACK,)) :]:
            ages_at = entry[-1].arrived_at + self._age_s
            if ages_at <= now:
                self._drop(entry)
                self._insert((FRONT, *entry[1:]))
            else:
                self._ages_at = min(self._ages_at, ages_at)

    def _to_push(self, held: Held) -> list[Held] | None:
        """The fewest batch requests, from the last on, whose going makes room; None if it cannot be made."""
        count, tokens, pushed = len(self._order) + 1, self._tokens + held.tokens, list[Held]()
        for rank, _, _, last in reversed(self._order):
            if count <= self._held_max and tokens <= self._tokens_max:
                break
            if rank == FRONT or held.priority is Priority.BATCH:
                return None
            pushed.append(last)
            count, tokens = count - 1, tokens - last.tokens
        return pushed if count <= self._held_max and tokens <= self._tokens_max else None

    def _insert(self, entry: Entry) -> None:
        held = entry[-1]
        insort(self._order, entry)
        self._entries[held.key] = entry
        self._tokens += held.tokens
        if entry[0] == BACK:
            self._ages_at = min(self._ages_at, held.arrived_at + self._age_s)
        if self._is_barrier(held) and (self._barrier is None or entry < self._barrier):
            self._barrier = entry

    def _drop(self, entry: Entry) -> None:
        held = entry[-1]
        del self._order[bisect_left(self._order, entry)]
        del self._entries[held.key]
        self._tokens -= held.tokens
        if self._barrier is entry:
            self._find_barrier()

    def _find_barrier(self) -> None:
        self._barrier = next((entry for entry in self._order if self._is_barrier(entry[-1])), None)

    def _is_barrier(self, held: Held) -> bool:
        return held.bars and held.overtaken >= self._overtaken_max
