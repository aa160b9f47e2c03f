"""Those who are held: their order, who may pass whom and how often, the bounds, and that each ends once."""

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conductor.admitted import Told, Wanted
from conductor.ask import Limits, Priority
from conductor.line import BEHIND_SHARE, LAST_CALL_S, LONG_SHARE, PATIENCE_AGES, Held, Line, held_of
from conductor.place import Placement, Prompt
from protocol.ids import RequestId, SegmentId
from tests.conductor.test_view import a_view, the

AGE_S = 10.0
HELD_MAX = 6
TOKENS_MAX = 100
OVERTAKEN_MAX = 3


def a_line(
    held_max: int = HELD_MAX,
    tokens_max: int = TOKENS_MAX,
    overtaken_max: int = OVERTAKEN_MAX,
    age_s: float = AGE_S,
    rescue_share: float = 0.0,
) -> Line:
    return Line(
        held_max=held_max,
        tokens_max=tokens_max,
        overtaken_max=overtaken_max,
        age_s=age_s,
        rescue_share=rescue_share,
    )


def held(
    name: str,
    *,
    batch: bool = False,
    tokens: int = 1,
    arrived_at: float = 0.0,
    deadline: float = 1000.0,
    rescue_at: float = math.inf,
) -> Held:
    priority = Priority.BATCH if batch else Priority.INTERACTIVE
    key = RequestId(name)
    return Held(key, priority, tokens, arrived_at, due=deadline, deadline=deadline, rescue_at=rescue_at)


def filled(line: Line, *several: Held, now: float = 0.0) -> Line:
    for one in several:
        assert line.add(one, now) == []
        line.check()
    return line


def names(line: Line, now: float = 0.0) -> str:
    return " ".join(one.key for one in line.candidates(now))


# --- the order


def test_interactive_before_batch_and_earliest_deadline_first() -> None:
    several = [
        held("b", batch=True, deadline=3.0),
        held("late", deadline=9.0),
        held("c", batch=True, deadline=2.0),
        held("soon", deadline=4.0),
    ]
    assert names(filled(a_line(), *several)) == "soon late c b"


def test_equal_deadlines_keep_the_order_of_arrival() -> None:
    assert names(filled(a_line(), held("x", deadline=5.0), held("a", deadline=5.0))) == "x a"


def test_a_far_deadline_does_not_stand_behind_later_arrivals_for_ever() -> None:
    line = filled(a_line(), held("far", deadline=1e9))
    filled(line, held("early", arrived_at=1.0, deadline=5.0), now=1.0)
    late = PATIENCE_AGES * AGE_S
    filled(line, held("late", arrived_at=late, deadline=late + 5.0), now=late)
    assert names(line, late) == "early far late"


def test_batch_that_has_waited_long_counts_as_interactive() -> None:
    """B39 (c): the low ones still finish."""
    line = filled(a_line(), held("b", batch=True, deadline=15.0), held("c", batch=True, arrived_at=5.0))
    filled(line, held("i", arrived_at=9.0, deadline=16.0), now=9.0)
    assert names(line, 9.9) == "i b c"
    assert names(line, 10.0) == "b i c"
    line.check()
    assert names(line, 15.0) == "b i c"
    line.check()
    young, old = held("y", batch=True, arrived_at=6.0), held("o", batch=True, arrived_at=5.0)
    assert line.yields(young, 15.0)
    assert not line.yields(old, 15.0)
    assert not line.yields(held("k", arrived_at=15.0), 15.0)
    assert names(filled(line, held("j", arrived_at=16.0, deadline=100.0), now=16.0), 16.0) == "b i c j"


def test_a_batch_request_that_comes_back_is_as_old_as_it_is() -> None:
    line = filled(a_line(), held("i", deadline=50.0))
    filled(line, held("b", batch=True, arrived_at=-AGE_S, deadline=20.0))
    assert names(line) == "b i"


def test_a_high_one_goes_before_low_ones_that_came_first() -> None:
    """B39 (c): the high one is the next to be tried."""
    line = filled(a_line(), *(held(f"low{n}", batch=True) for n in range(4)), held("high"))
    assert names(line) == "high low0 low1 low2 low3"


# --- who may pass whom


def test_one_that_was_overtaken_as_often_as_may_be_is_a_barrier() -> None:
    line = filled(a_line(), held("long", tokens=50), *(held(f"s{n}", deadline=2000.0) for n in range(5)))
    for n in range(OVERTAKEN_MAX):
        found = list(line.candidates(0.0))
        assert [one.key for one in found] == ["long", *(f"s{m}" for m in range(n, 5))]
        line.admitted(found[1], 0.0)
        line.check()
    assert names(line) == "long"
    line.admitted(next(line.candidates(0.0)), 0.0)
    line.check()
    assert names(line) == "s3 s4"


@pytest.mark.parametrize("leave", ["remove", "expired"])
def test_a_barrier_that_goes_lets_the_others_pass(leave: str) -> None:
    line = filled(a_line(overtaken_max=1), held("long", deadline=5.0), held("s0"), held("s1"))
    line.admitted(list(line.candidates(0.0))[1], 0.0)
    assert names(line) == "long"
    gone = [line.remove(RequestId("long"))] if leave == "remove" else line.expired(5.0)
    assert [one.key for one in gone if one is not None] == ["long"]
    line.check()
    assert names(line) == "s1"


def test_an_admission_that_makes_a_barrier_ends_the_walk() -> None:
    line = filled(a_line(), held("long"), *(held(f"s{n}", deadline=2000.0) for n in range(5)))
    admitted = []
    for one in line.candidates(0.0):
        if one.key != "long":
            line.admitted(one, 0.0)
            admitted.append(one.key)
    assert admitted == ["s0", "s1", "s2"]


def test_who_left_during_the_walk_is_passed_over() -> None:
    line = filled(a_line(), held("a"), held("b"), held("c"))
    seen = []
    for one in line.candidates(0.0):
        seen.append(one.key)
        line.remove(RequestId("b"))
    assert seen == ["a", "c"]


def test_a_newcomer_that_passes_counts_as_having_overtaken() -> None:
    line = filled(a_line(overtaken_max=2), held("long", deadline=15.0))
    for n in range(2):
        newcomer = held(f"n{n}", deadline=19.0)
        assert line.may_pass(newcomer, 0.0)
        line.admitted(newcomer, 0.0)
        line.check()
    assert not line.may_pass(held("n2", deadline=19.0), 0.0)
    assert not line.may_pass(held("b", batch=True, deadline=1.0), 0.0)
    assert line.may_pass(held("urgent", deadline=14.0), 0.0)
    assert len(line) == 1


def test_nobody_goes_past_a_barrier() -> None:
    line = filled(a_line(overtaken_max=0), held("long"), held("s"))
    assert names(line) == "long"
    with pytest.raises(AssertionError, match="s went past a barrier"):
        line.admitted(line._entries[RequestId("s")][-1], 0.0)


def test_an_interactive_one_overtakes_no_batch() -> None:
    line = filled(a_line(overtaken_max=1), held("b", batch=True))
    for n in range(3):
        line.admitted(held(f"n{n}"), 0.0)
    assert names(line) == "b"
    assert next(line.candidates(0.0)).overtaken == 0


@given(st.integers(0, 4), st.integers(1, 40))
def test_a_long_one_begins_after_a_bounded_number_of_short_ones(overtaken_max: int, shorts: int) -> None:
    """B39 (b): a long prompt needs all of the room, which short ones would take again and again."""
    line = filled(a_line(held_max=100, overtaken_max=overtaken_max), held("long", tokens=4, deadline=10.0))
    began: list[str] = []
    running: list[int] = [1, 1]
    for n in range(shorts):
        filled(line, held(f"s{n}", deadline=20.0))
        for one in line.candidates(0.0):
            if sum(running) + one.tokens <= 4:
                line.admitted(one, 0.0)
                running.append(one.tokens)
                began.append(one.key)
        if running:
            running.pop(0)
    assert len(began if "long" not in began else began[: began.index("long")]) <= overtaken_max
    assert "long" in began or shorts < overtaken_max + 4


# --- the bounds


def test_no_more_than_so_many() -> None:
    """B41: the queue stays below its cap."""
    line = filled(a_line(held_max=2), held("a"), held("b"))
    assert line.add(held("c"), 0.0) is None
    assert (names(line), len(line), line.tokens) == ("a b", 2, 2)
    line.check()


def test_no_more_than_so_many_tokens() -> None:
    """B41: queued tokens stay below their cap, however few the requests are."""
    line = filled(a_line(tokens_max=100), held("a", tokens=60))
    assert line.add(held("b", tokens=41), 0.0) is None
    assert a_line(tokens_max=100).add(held("huge", tokens=101), 0.0) is None
    filled(line, held("c", tokens=40))
    assert line.tokens == 100


def test_an_interactive_one_pushes_out_the_batch_that_stands_last_and_no_more_than_it_needs() -> None:
    several = [held("a"), *(held(f"b{n}", batch=True, tokens=30, deadline=5.0 + n) for n in range(3))]
    line = filled(a_line(), *several)
    assert line.add(held("c", batch=True, tokens=30, deadline=1.0), 0.0) is None
    assert line.add(held("i", tokens=60), 0.0) == [several[3], several[2]]
    line.check()
    assert names(line) == "a i b0"
    assert line.add(held("j", tokens=90), 0.0) is None
    assert names(line) == "a i b0"


def test_batch_that_has_aged_is_not_pushed_out() -> None:
    line = filled(a_line(held_max=1), held("b", batch=True))
    assert line.add(held("i", arrived_at=AGE_S), AGE_S) is None


def test_expired_and_removed_are_out() -> None:
    line = filled(a_line(), held("a", deadline=5.0), held("b", deadline=4.0), held("c", batch=True, deadline=5.0))
    assert line.expired(3.9) == []
    assert [one.key for one in line.expired(5.0)] == ["b", "a", "c"]
    assert (len(line), line.tokens) == (0, 0)
    assert line.remove(RequestId("a")) is None
    assert RequestId("a") not in line


def test_a_long_prompt_is_behind_those_that_reach_decode_before_it_and_before_all_that_come_later() -> None:
    line = a_line()
    for name, arrived_at, prefill_s in (("long", 0.0, 8.0), ("short", 1.0, 1.0), ("late", 8.0, 1.0)):
        ends_at = arrived_at + 5.0
        one = Held(RequestId(name), Priority.INTERACTIVE, 1, arrived_at, ends_at + prefill_s, ends_at)
        assert line.add(one, 0.0) == []
    assert names(line) == "short long late"


def test_one_that_asks_for_more_than_others_are_given_bars_nobody() -> None:
    strict = held("strict", deadline=5.0)
    strict.bars = False
    line = filled(a_line(overtaken_max=0), strict, held("a"), held("b"))
    assert names(line) == "strict a", "the barrier is the first that bars"
    assert line.may_pass(held("early", deadline=6.0), 0.0)
    assert not line.may_pass(held("late", deadline=2000.0), 0.0)


# --- when it is due, and its last moment to begin


def wished(
    whole_s: float, limit_s: float = 30.0, tbt_s: float = 0.5, *, usual_s: float = 30.0, within_s: float = 600.0
) -> Held:
    """One that arrived at 100 s, and would stand in a queue for 3 s and then take 8 s."""
    limits = Limits(limit_s, tbt_s)
    wanted = Wanted(
        RequestId("r"), Prompt(70, 0), [0], Priority.BATCH, limits, 100.0, 100.0 + within_s, told=Told()
    )
    prefill, near = the(a_view("kvcache-0", "prefill-0"), "prefill-0"), SegmentId("kvcache-0")
    plan = Placement(prefill, 0, 0, None, 0, near, queue_s=3.0, work_s=8.0, ttft_s=11.0)
    return held_of(wanted, plan, whole_s, Limits(usual_s, 0.5))


def test_it_is_due_after_its_limit_by_its_whole_prefill_up_to_a_share_of_the_limit() -> None:
    one = wished(5.0)
    assert (one.key, one.priority, one.tokens) == ("r", Priority.BATCH, 70)
    assert (one.arrived_at, one.deadline, one.due) == (100.0, 130.0, 135.0)
    assert wished(20.0).due == 130.0 + BEHIND_SHARE * 30.0


def test_only_what_takes_much_of_its_limit_has_a_last_moment_to_begin() -> None:
    assert wished(LONG_SHARE * 30.0 + 0.1).rescue_at == 130.0 - 3.0 - 8.0 - LAST_CALL_S
    assert wished(LONG_SHARE * 30.0).rescue_at == math.inf


def test_one_that_asks_for_more_than_others_are_given_neither_bars_nor_is_rescued_for_that() -> None:
    assert [wished(5.0, tbt_s=tbt_s).bars for tbt_s in (0.4, 0.5, 0.6)] == [False, True, True]
    assert wished(11.0, 20.0).rescue_at == math.inf
    assert wished(12.5, 20.0).rescue_at == 120.0 - 3.0 - 8.0 - LAST_CALL_S
    assert wished(11.0, 20.0, usual_s=20.0).rescue_at == 120.0 - 3.0 - 8.0 - LAST_CALL_S


def test_nothing_lasts_longer_than_the_request_may() -> None:
    one = wished(15.0, within_s=20.0)
    assert (one.deadline, one.due, one.rescue_at) == (120.0, 127.5, 120.0 - 3.0 - 8.0 - LAST_CALL_S)


def test_where_there_is_no_limit_no_prompt_takes_much_of_it() -> None:
    one = wished(500.0, math.inf)
    assert (one.deadline, one.due, one.rescue_at) == (700.0, 1200.0, math.inf)


# --- rescue


def overloaded(*several: Held, rescue_share: float = 0.25) -> Line:
    """Behind a barrier."""
    line = a_line(overtaken_max=0, rescue_share=rescue_share)
    return filled(line, held("first", tokens=10, deadline=5.0), *several)


def test_one_whose_last_moment_has_come_goes_before_all_and_past_every_barrier() -> None:
    line = overloaded(held("second", deadline=6.0), held("long", tokens=40, deadline=10.0, rescue_at=4.0))
    assert names(line, 3.9) == "first"
    assert names(line, 4.0) == "long first"
    line.admitted(next(line.candidates(4.0)), 4.0)
    line.check()
    assert [one.overtaken for one in line.candidates(4.0)] == [0], "it is paid for otherwise"


def test_a_newcomer_whose_last_moment_has_come_may_pass() -> None:
    line = overloaded()
    assert line.may_pass(held("long", deadline=10.0, rescue_at=4.0), 4.0)
    assert not line.may_pass(held("long", deadline=10.0, rescue_at=4.0), 3.9)
    assert not overloaded(rescue_share=0.0).may_pass(held("long", deadline=10.0, rescue_at=4.0), 4.0)


def test_nobody_is_rescued_until_the_others_have_made_up_for_the_last() -> None:
    several = [held(f"long{n}", tokens=30, deadline=10.0 + n, rescue_at=4.0) for n in range(2)]
    line = a_line(overtaken_max=0, rescue_share=0.25)
    filled(line, held("first", tokens=10, deadline=5.0), *several)
    assert names(line, 4.0) == "long0 long1 first"
    walk = line.candidates(4.0)
    line.admitted(next(walk), 4.0)
    assert [one.key for one in walk] == ["first"], "the walk goes on without the other"
    for paid in (10, 100):
        assert names(line, 4.0) == "first"
        line.admitted(held(f"early{paid}", tokens=paid, deadline=1.0), 4.0)
    assert names(line, 4.0) == "first", "30 are owed, of 110 a quarter is paid"
    line.admitted(held("last", tokens=10, deadline=1.0), 4.0)
    assert names(line, 4.0) == "long1 first"


def test_one_that_could_be_rescued_and_left_during_the_walk_is_passed_over() -> None:
    line = overloaded(*(held(f"long{n}", deadline=10.0 + n, rescue_at=4.0) for n in range(2)))
    walk = line.candidates(4.0)
    assert next(walk).key == "long0"
    line.remove(RequestId("long1"))
    assert [one.key for one in walk] == ["first"]


def test_batch_is_not_rescued_before_it_counts_as_interactive() -> None:
    line = overloaded(held("b", batch=True, deadline=8.0, rescue_at=4.0))
    assert names(line, 4.0) == "first"
    assert names(line, AGE_S) == "b first"


# --- all of it together


RESCUE_SHARE = 0.25


@dataclasses.dataclass
class Seen:
    """What a test knows of one request, without asking the line."""

    one: Held
    number: int
    overtaken: int = 0

    @property
    def is_barrier(self) -> bool:
        return self.one.bars and self.overtaken >= OVERTAKEN_MAX

    def stands(self, now: float) -> tuple[bool, float, int]:
        batch = self.one.priority is Priority.BATCH and self.one.arrived_at + AGE_S > now
        return (batch, min(self.one.due, self.one.arrived_at + PATIENCE_AGES * AGE_S), self.number)


class AnyTraffic(RuleBasedStateMachine):
    """Whatever comes in whatever order: the line does what a simple list would."""

    def __init__(self) -> None:
        super().__init__()
        self.line = a_line(rescue_share=RESCUE_SHARE)
        self.now = self.debt = 0.0
        self.rescued: list[int] = []
        self.admitted_tokens = 0
        self.inside: list[Seen] = []
        self.ended: list[RequestId] = []
        self.taken_in: list[RequestId] = []
        self.number = 0

    def a_newcomer(
        self, batch: bool, tokens: int, patience: float, *, bars: bool = True, last_call: float = math.inf
    ) -> Held:
        self.number += 1
        rescue_at = self.now + last_call
        one = held(f"r{self.number}", batch=batch, tokens=tokens, arrived_at=self.now, rescue_at=rescue_at)
        one.deadline, one.due, one.bars = self.now + patience, self.now + patience + tokens % 7, bars
        return one

    def in_order(self) -> list[Seen]:
        return sorted(self.inside, key=lambda seen: seen.stands(self.now))

    def may_rescue(self, seen: Seen) -> bool:
        return self.debt <= 0 and not seen.stands(self.now)[0] and seen.one.rescue_at <= self.now

    def admitted(self, seen: Seen) -> None:
        """What the model makes of it."""
        self.admitted_tokens += seen.one.tokens
        before = [other for other in self.inside if other.stands(self.now) < seen.stands(self.now)]
        if any(other.is_barrier for other in before):
            assert self.may_rescue(seen)
            self.debt += seen.one.tokens
            self.rescued.append(seen.one.tokens)
        else:
            self.debt = max(self.debt - RESCUE_SHARE * seen.one.tokens, 0.0)
            for other in before:
                other.overtaken += 1

    def end(self, key: RequestId) -> None:
        self.ended.append(key)
        self.inside = [seen for seen in self.inside if seen.one.key != key]

    @rule(
        batch=st.booleans(),
        tokens=st.integers(1, 40),
        patience=st.sampled_from([1.0, 5.0, 20.0, 500.0]),
        bars=st.booleans(),
        last_call=st.sampled_from([0.0, 2.0, math.inf]),
    )
    def add(self, batch: bool, tokens: int, patience: float, bars: bool, last_call: float) -> None:
        one = self.a_newcomer(batch, tokens, patience, bars=bars, last_call=last_call)
        before = [seen.one for seen in self.in_order()]
        full = len(before) == HELD_MAX or sum(other.tokens for other in before) + tokens > TOKENS_MAX
        pushed = self.line.add(one, self.now)
        assert full == (pushed != [])
        if pushed is None:
            assert [seen.one for seen in self.in_order()] == before
            return
        assert pushed == before[len(before) - len(pushed) :][::-1]
        assert not pushed or not batch
        for other in pushed:
            assert other.priority is Priority.BATCH
            self.end(other.key)
        self.taken_in.append(one.key)
        self.inside.append(Seen(one, self.number))

    @rule(
        batch=st.booleans(),
        patience=st.sampled_from([1.0, 5.0, 20.0, 500.0]),
        last_call=st.sampled_from([0.0, 2.0, math.inf]),
    )
    def pass_by(self, batch: bool, patience: float, last_call: float) -> None:
        one = self.a_newcomer(batch, 1, patience, last_call=last_call)
        newcomer = Seen(one, self.number)
        barriers = [seen for seen in self.inside if seen.is_barrier]
        behind = any(seen.stands(self.now) < newcomer.stands(self.now) for seen in barriers)
        may = not behind or self.may_rescue(newcomer)
        assert self.line.may_pass(one, self.now) == may
        if may:
            self.line.admitted(one, self.now)
            self.admitted(newcomer)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        found = list(self.line.candidates(self.now))
        one = data.draw(st.sampled_from(found))
        self.line.admitted(one, self.now)
        self.admitted(next(seen for seen in self.inside if seen.one is one))
        self.end(one.key)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.inside)).one
        assert self.line.remove(one.key) is one
        self.end(one.key)

    @rule(seconds=st.sampled_from([0.5, 3.0, AGE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = self.line.expired(self.now)
        assert {one.key for one in over} == {seen.one.key for seen in self.inside if seen.one.deadline <= self.now}
        for one in over:
            self.end(one.key)

    @invariant()
    def the_order_is_the_models_down_to_the_first_barrier(self) -> None:
        rescued = [seen for seen in self.in_order() if self.may_rescue(seen)]
        expected = [seen.one.key for seen in rescued]
        for seen in self.in_order():
            if seen not in rescued:
                expected.append(seen.one.key)
            if seen.is_barrier:
                break
        assert [one.key for one in self.line.candidates(self.now)] == expected

    @invariant()
    def nobody_who_bars_is_overtaken_more_often_than_may_be(self) -> None:
        assert all(seen.overtaken == seen.one.overtaken for seen in self.inside)
        assert all(seen.overtaken <= OVERTAKEN_MAX for seen in self.inside if seen.one.bars)

    @invariant()
    def no_more_than_their_share_and_one_prompt_is_of_the_rescued(self) -> None:
        assert sum(self.rescued[:-1]) <= RESCUE_SHARE * self.admitted_tokens

    @invariant()
    def bounds_hold_and_each_that_came_in_is_inside_or_has_ended_once(self) -> None:
        self.line.check()
        assert len(self.line) == len(self.inside) <= HELD_MAX
        assert self.line.tokens == sum(seen.one.tokens for seen in self.inside) <= TOKENS_MAX
        assert sorted([*self.ended, *(seen.one.key for seen in self.inside)]) == sorted(self.taken_in)


TestAnyTraffic = AnyTraffic.TestCase


def a_run(seed: int) -> list[tuple[str, ...]]:
    """Everything that a line says on one seed's traffic."""
    dice, line, said = random.Random(seed), a_line(), list[tuple[str, ...]]()
    for n in range(300):
        one = held(f"r{n}", batch=dice.random() < 0.5, tokens=dice.randint(1, 30), arrived_at=float(n))
        one.deadline = n + dice.choice([3.0, 30.0])
        said.append(tuple(other.key for other in line.add(one, n) or ()))
        said.append(tuple(other.key for other in line.expired(n)))
        found = list(line.candidates(n))
        if found and dice.random() < 0.3:
            line.admitted(dice.choice(found), n)
        said.append(tuple(other.key for other in found))
    return said


def test_the_same_traffic_gives_the_same_line() -> None:
    assert a_run(1) == a_run(1) != a_run(2)
