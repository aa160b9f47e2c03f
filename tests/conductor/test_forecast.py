"""Who will be there, what a step will take then, and which instance is best: more load never looks better."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.ask import Priority
from conductor.estimate import Estimates, StepLine
from conductor.forecast import (
    CANDIDATES_MAX,
    PAGES_EACH,
    PRESENCES,
    Forecast,
    Moment,
    Outlook,
    at_decode,
    early,
    predictive,
    survival,
)
from conductor.lengths import Lengths, Tail
from conductor.view import STALE_REPORTS, Instance, Stream, View
from protocol.ids import RequestId
from protocol.registry import REPORT_EVERY_S, Load, Pool
from tests.conductor.test_view import a_view, the

NOW = 100.0
LINE = StepLine(base_s=0.010, row_s=0.001, token_s=1e-6)
STEP_S = 0.02
PAGE = 16


class SameForAll:
    """Estimates of a cluster whose instances take equal times."""

    def __init__(self, line: StepLine = LINE, fresh: int = 100) -> None:
        self.line = line
        self.samples = fresh

    def step(self, kind: str) -> StepLine:
        return self.line

    def fresh(self, pool: Pool, kind: str, now: float) -> int:
        return self.samples


def choose(instances: Iterable[Instance], estimates: Estimates, outlook: Outlook) -> Forecast | None:
    """The first that `rank` gives."""
    return next(iter(outlook.rank(instances, estimates)), None)


def a_tail(longest: int = 400) -> Tail:
    """Answers of 1 to `longest` tokens, all equally likely."""
    lengths = Lengths()
    for n in range(400):
        lengths.observe(Priority.INTERACTIVE, n % longest + 1)
    return lengths.tail(Priority.INTERACTIVE)


TAIL = a_tail()


def running(context: int = 1000, said: int = 10, since: float = 1.0, **more: object) -> Stream:
    """Joined `since` seconds ago, and heard of just now."""
    return Stream(context, NOW - since, joined_at=NOW - since, said=said, said_at=NOW, **more)  # type: ignore[arg-type]


def coming(context: int = 1000, in_s: float = 1.0, **more: object) -> Stream:
    """On its way; its prompt will be computed in so many seconds."""
    return Stream(context, NOW + in_s, **more)  # type: ignore[arg-type]


def enter(view: View, name: str, *streams: Stream) -> Instance:
    instance = the(view, name)
    for stream in streams:
        view.enter(instance, (RequestId(f"r{len(instance.streams)}"), 0), stream)
    return instance


def a_pool(decodes: int = 1, blocks: int = 0) -> View:
    """A cluster with so many decode instances, fresh reports, and nothing to do."""
    view = a_view("kvcache-0", "prefill-0", *(f"decode-{n}" for n in range(decodes)))
    for instance in view.of(Pool.DECODE):
        load = Load(step_s=STEP_S, blocks_total=blocks)
        assert view.report(instance.name, instance.incarnation, load, NOW)
    return view


def an_outlook(**more: object) -> Outlook:
    ours = Outlook(NOW, NOW + 2, survival, TAIL, TAIL, context=1000, growth=200, block_tokens=PAGE)
    return replace(ours, **more)  # type: ignore[arg-type]


def forecast(*streams: Stream, blocks: int = 0, **more: object) -> Forecast:
    return an_outlook(**more).of(enter(a_pool(blocks=blocks), "decode-0", *streams), LINE)


def at(in_s: float, residence_s: float = 5.0) -> Moment:
    return Moment(NOW, NOW + in_s, 1 / STEP_S, TAIL, a_tail(40), residence_s)


# --- presences


def test_early_and_at_decode_look_at_the_present_only():
    assert early(running(since=1e6), at(100)) == at_decode(running(since=1e6), at(100)) == 1
    assert at_decode(coming(in_s=1), at(100)) == 0
    assert at_decode(coming(in_s=0, handed_over=True), at(0)) == 1, "about to join"
    assert at_decode(coming(in_s=-5), at(0)) == 0, "late, and still in prefill"
    assert early(coming(in_s=0), at(0)) == early(coming(in_s=-5), at(0)) == 0
    assert early(coming(in_s=1), at(2)) == 1, "asked of a later moment it leaves nobody out"


def test_predictive_lets_everybody_stay_equally_long():
    assert predictive(running(since=1), at(3.9)) == 1
    assert predictive(running(since=1), at(4.0)) == 0
    assert predictive(coming(in_s=2), at(1.9)) == 0
    assert predictive(coming(in_s=2), at(2.0)) == 1
    assert predictive(coming(in_s=2), at(7.0)) == 0
    assert predictive(coming(in_s=-9), at(4.9)) == 1, "late, so it will stay from now on"


def test_survival_asks_how_many_answers_of_its_age_go_on():
    assert survival(running(said=0), at(4)) == TAIL.survives(0, 200) == pytest.approx(0.5, abs=0.12)
    assert survival(running(said=200), at(2)) == TAIL.survives(200, 100)
    assert survival(coming(in_s=1), at(3)) == TAIL.survives(0, 100)
    assert survival(coming(in_s=1), at(0.5)) == 0
    assert survival(coming(in_s=-5), at(2)) == TAIL.survives(0, 100)


def test_survival_knows_classes_and_counts_tokens_that_are_not_heard_of_yet():
    silent = running(said=100)
    silent.said_at = NOW - 2
    assert survival(silent, at(1)) == TAIL.survives(200, 50)
    silent.said_at = NOW + 1
    assert survival(silent, at(1)) == TAIL.survives(100, 50)
    assert survival(running(priority=Priority.BATCH), at(2)) < 0.1


# --- one instance


def test_an_empty_instance_is_predicted_with_the_candidate_alone():
    alone = forecast()
    assert alone.alone
    assert alone.step_s == pytest.approx(0.010 + 0.001 + 1e-6 * 1000)
    assert (alone.batch, alone.room_share) == (1, 0)
    assert alone.fits
    assert forecast(choices=3).step_s == pytest.approx(0.010 + 3 * (0.001 + 1e-6 * 1000))


def test_a_forecast_sums_presences_and_counts_what_streams_will_have_said():
    both = forecast(running(2000, said=50), coming(3000, in_s=1))
    goes_on, new = TAIL.survives(50, 100), TAIL.survives(0, 50)
    assert both.batch == pytest.approx(1 + goes_on + new)
    context = 1000 + goes_on * (2050 + 100) + new * (3000 + 50)
    assert both.step_s == pytest.approx(0.010 + 0.001 * both.batch + 1e-6 * context)
    assert not both.alone


def test_doubt_costs_z_standard_deviations():
    stream = running(2000, said=50)
    share = TAIL.survives(50, 100)
    row = 0.001 + 1e-6 * 2150
    doubt_s = forecast(*[stream] * 4, z=2.0).step_s - forecast(*[stream] * 4).step_s
    assert doubt_s == pytest.approx(2 * math.sqrt(4 * share * (1 - share)) * row)


def test_the_rows_of_a_batch_are_room_too():
    """Who comes beyond would wait for a place with its first token out."""

    def of(rows_max: int, blocks: int = 0) -> Forecast:
        view = a_pool()
        instance = enter(view, "decode-0", running(said=0), running(said=0))
        load = Load(step_s=STEP_S, blocks_total=blocks, rows_max=rows_max)
        assert view.report(instance.name, instance.incarnation, load, NOW)
        return an_outlook(at=NOW).of(instance, LINE)

    assert of(0).room_share == 0.0
    assert (of(4).room_share, of(4).fits) == (3 / 4, True)
    assert (of(2).room_share, of(2).fits) == (3 / 2, False)
    assert of(4, blocks=10).room_share > 1.0, "the scarcer of both"


def test_with_a_reserve_the_worst_of_the_moments_counts_at_which_others_are_due():
    """The candidate comes in 2 s and advances 50 tokens a second; the span of the other begins 16 s after that."""
    later = coming(3000, in_s=30)
    assert forecast(later).batch == 1
    assert forecast(later).alone
    assert forecast(later, reserve=True).batch == 1 + TAIL.survives(0, 16 * 50) == 1, (
        "the candidate has gone by then"
    )
    assert not forecast(later, reserve=True).alone
    assert forecast(later, reserve=True).step_s == pytest.approx(0.010 + 0.001 + 1e-6 * 3000)
    soon = coming(3000, in_s=5)
    stays = TAIL.survives(0, 2 * 50)
    both_s = 0.010 + 0.001 * (1 + stays) + 1e-6 * (3000 + stays * 1100)
    assert forecast(soon, reserve=True).step_s == pytest.approx(both_s)


def test_with_a_reserve_who_is_due_within_a_span_is_there_from_its_start_on():
    assert forecast(coming(3000, in_s=3.9), reserve=True).batch == 2, "in the first span, with the candidate"
    gone, goes_on = running(2000, said=200), TAIL.survives(200, 4 * 50)
    later = forecast(gone, coming(3000, in_s=4.5), reserve=True)
    assert later.batch == pytest.approx(max(1 + TAIL.survives(200, 100), goes_on + 1 + TAIL.survives(0, 100)))
    assert forecast(running(), reserve=True).batch == forecast(running()).batch
    late = coming(in_s=-3)
    assert forecast(late, reserve=True, at=NOW, presence=early).batch == 2, "still on its way"


def test_memory_counts_what_the_candidate_will_say_and_pages_that_are_not_full():
    alone, both = 1200 + PAGES_EACH * PAGE, 2200 + 2 * PAGES_EACH * PAGE
    assert forecast(blocks=80).room_share == pytest.approx(alone / (80 * PAGE))
    assert forecast(blocks=math.ceil(alone / PAGE)).fits
    assert not forecast(blocks=math.ceil(alone / PAGE) - 1).fits
    full = forecast(running(1000, said=0), blocks=150, at=NOW)
    assert full.room_share == pytest.approx(both / (150 * PAGE))
    doubted = forecast(running(1000, said=0), blocks=150, z=2.0)
    assert doubted.room_share > forecast(running(1000, said=0), blocks=150).room_share


def test_the_strictest_promise_to_a_likely_stream_is_told():
    assert forecast(running()).promised_s == math.inf
    assert forecast(running(tbt_s=0.2), running(tbt_s=0.1), running(tbt_s=0.3)).promised_s == 0.1
    gone = running(said=395, tbt_s=0.05)
    assert forecast(running(tbt_s=0.1), gone, at=NOW + 20).promised_s == math.inf


def test_an_instance_that_has_not_stepped_is_taken_to_run_one_alone():
    instance = enter(a_pool(), "decode-0", running(said=0))
    instance.load = Load()
    assert an_outlook().of(instance, LINE).batch == 1 + TAIL.survives(0, 2 / 0.011)
    assert an_outlook().of(instance, StepLine(0, 0, 0)).batch == 2, "nothing is known: nobody moves on"


# --- reports


def a_reported(view: View, running: int, context: int, at_s: float = NOW) -> Instance:
    instance = the(view, "decode-0")
    load = Load(running=running, context_tokens=context, step_s=STEP_S)
    assert view.report(instance.name, instance.incarnation, load, at_s)
    return instance


def test_what_a_fresh_report_tells_beyond_the_ledger_counts():
    view = a_pool()
    enter(view, "decode-0", running(1000, said=0))
    counted = an_outlook(at=NOW).of(a_reported(view, running=3, context=6000), LINE)
    assert counted.batch == 1 + 1 + 2
    assert counted.step_s == pytest.approx(0.010 + 0.001 * 4 + 1e-6 * (1000 + 1000 + 2 * 2000))


def test_foreign_requests_that_only_wait_count_as_rows():
    view = a_pool()
    load = Load(waiting=2, step_s=STEP_S)
    assert view.report(the(view, "decode-0").name, the(view, "decode-0").incarnation, load, NOW)
    assert an_outlook().of(the(view, "decode-0"), LINE).batch == 3


def test_a_stale_report_means_unknown_not_full():
    """B43: load reports stop, and the gate must not read that as full."""
    view = a_pool()
    instance = a_reported(view, running=500, context=10**6, at_s=NOW - STALE_REPORTS * REPORT_EVERY_S - 0.01)
    assert an_outlook().of(instance, LINE) == replace(forecast(), instance=instance)


# --- the choice


def test_the_choice_counts_what_is_on_its_way_and_so_does_not_herd():
    view, estimates, went = a_pool(3), SameForAll(), []
    for n in range(9):
        best = choose(view.of(Pool.DECODE), estimates, an_outlook(reserve=True))
        assert best is not None
        view.enter(best.instance, (RequestId(f"new{n}"), 0), coming(in_s=2))
        went.append(best.instance.name)
    assert went == ["decode-0", "decode-1", "decode-2"] * 3


def test_those_with_memory_come_before_those_without():
    view = a_pool(2, blocks=75)
    enter(view, "decode-0", running(100, said=0))
    enter(view, "decode-1", running(90, said=0))
    the(view, "decode-0").load = Load(step_s=STEP_S, blocks_total=1000)
    ranked = list(an_outlook().rank(view.of(Pool.DECODE), SameForAll()))
    assert [(f.instance.name, f.fits) for f in ranked] == [("decode-0", True), ("decode-1", False)]


def test_nobody_to_choose_from():
    assert choose([], SameForAll(), an_outlook()) is None


def test_of_many_instances_the_roughly_best_are_looked_at_closely():
    view = a_pool(20)
    for n, instance in enumerate(view.of(Pool.DECODE)):
        enter(view, instance.name, *[running()] * (n % 10))
    ranked = list(an_outlook().rank(view.of(Pool.DECODE), SameForAll()))
    assert len(ranked) == CANDIDATES_MAX
    assert [len(f.instance.streams) for f in ranked] == [0, 0, 1, 1, 2, 2, 3, 3]


@given(st.lists(st.lists(st.floats(0, 60), max_size=6), min_size=1, max_size=CANDIDATES_MAX))
def test_who_is_best_by_the_first_span_is_not_taken_for_the_best_of_all(pool: list[list[float]]):
    view, outlook, estimates = a_pool(len(pool), blocks=200), an_outlook(reserve=True, z=2.0), SameForAll()
    for n, due in enumerate(pool):
        enter(view, f"decode-{n}", *(coming(300, in_s=in_s) for in_s in due))
    instances = view.of(Pool.DECODE)
    whole = [outlook.of(instance, LINE) for instance in instances]
    ranking = outlook.rank(instances, estimates)
    first = next(iter(ranking))
    assert list(ranking) == sorted(whole, key=lambda f: (not f.fits, f.step_s, f.instance.name))
    assert next(iter(ranking)) is first


def test_the_faster_kind_wins():
    view = a_pool(2)
    the(view, "decode-1").kind = "fast"

    class TwoKinds(SameForAll):
        def step(self, kind: str) -> StepLine:
            return StepLine(0.005, 0.001, 1e-6) if kind == "fast" else LINE

    best = choose(view.of(Pool.DECODE), TwoKinds(), an_outlook())
    assert best is not None
    assert best.instance.name == "decode-1"


# --- properties


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Any entry of a ledger at NOW."""
    priority, tbt_s = draw(st.sampled_from(Priority)), draw(st.sampled_from([0.02, 0.1, math.inf]))
    context = draw(st.integers(1, 10_000))
    if draw(st.booleans()):
        since, silent = draw(st.floats(0, 100)), draw(st.floats(0, 2))
        said = draw(st.integers(0, 1000))
        return Stream(context, NOW - since, priority, NOW - since, said, NOW - min(silent, since), tbt_s)
    return Stream(context, NOW + draw(st.floats(-10, 60)), priority, tbt_s=tbt_s)


ledgers = st.lists(streams(), max_size=12)


@st.composite
def outlooks(draw: st.DrawFn) -> Outlook:
    """Any way of looking ahead."""
    return an_outlook(
        at=NOW + draw(st.floats(0, 60)),
        presence=PRESENCES[draw(st.sampled_from(sorted(PRESENCES)))],
        reserve=draw(st.booleans()),
        z=draw(st.floats(0, 3)),
        residence_s=draw(st.floats(0.1, 50)),
    )


def never_better(after: Forecast, before: Forecast) -> None:
    room = 1 + 1e-9
    assert after.step_s * room >= before.step_s
    assert after.room_share * room >= before.room_share
    assert after.batch * room >= before.batch
    assert after.promised_s <= before.promised_s
    assert before.alone or not after.alone


@given(ledgers, streams(), outlooks())
def test_another_stream_never_makes_a_forecast_better(ledger, another, outlook):
    before = outlook.of(enter(a_pool(blocks=500), "decode-0", *ledger), LINE)
    after = outlook.of(enter(a_pool(blocks=500), "decode-0", *ledger, another), LINE)
    never_better(after, before)


@given(ledgers, st.integers(1, 5000), outlooks())
def test_longer_contexts_never_make_a_forecast_better(ledger, more, outlook):
    longer = [replace(stream, context=stream.context + more) for stream in ledger]
    before = outlook.of(enter(a_pool(blocks=500), "decode-0", *ledger), LINE)
    after = outlook.of(enter(a_pool(blocks=500), "decode-0", *longer), LINE)
    never_better(after, before)


@given(ledgers, outlooks())
def test_neither_reserve_nor_doubt_nor_a_larger_candidate_makes_a_forecast_better(ledger, outlook):
    instance = enter(a_pool(blocks=500), "decode-0", *ledger)
    plain = outlook.of(instance, LINE)
    for harder in (
        replace(outlook, z=outlook.z + 1),
        replace(outlook, reserve=True),
        replace(outlook, context=outlook.context + 100),
        replace(outlook, choices=2),
    ):
        never_better(harder.of(instance, LINE), plain)


@given(ledgers, outlooks())
def test_presences_are_probabilities(ledger, outlook):
    moment = Moment(NOW, outlook.at, 50.0, TAIL, TAIL, outlook.residence_s)
    assert all(0 <= outlook.presence(stream, moment) <= 1 for stream in ledger)


@given(st.lists(ledgers, min_size=2, max_size=4), outlooks())
def test_a_choice_is_the_least_step_and_always_the_same(several, outlook):
    view = a_pool(len(several), blocks=500)
    for n, ledger in enumerate(several):
        enter(view, f"decode-{n}", *ledger)
    instances = view.of(Pool.DECODE)
    best = choose(instances, SameForAll(), outlook)
    assert best is not None
    assert best == choose(reversed(instances), SameForAll(), outlook)
    rivals = [outlook.of(instance, LINE) for instance in instances]
    assert (not best.fits, best.step_s) == min((not rival.fits, rival.step_s) for rival in rivals)


def test_a_step_is_longer_while_part_of_a_prompt_is_computed_beside_it():
    rest = running(since=0.0, said=0)
    rest.due_at = NOW + 2
    plain = forecast(rest)
    rest.rest_s = 0.5
    assert forecast(rest).step_s == pytest.approx(plain.step_s + 0.5), "it is under way at the hand-over"
    rest.due_at = NOW + 1.9
    assert forecast(rest).step_s == pytest.approx(plain.step_s), "it will be over by then"
    rest.due_at, rest.said = NOW + 2, 1
    assert forecast(rest).step_s < plain.step_s + 0.1, "its first token is there"


def test_a_rest_that_is_late_is_under_way_still():
    late = running(since=1.0, said=0)
    late.due_at = NOW - 0.5
    plain = forecast(late, at=NOW)
    late.rest_s = 0.5
    assert forecast(late, at=NOW).step_s == pytest.approx(plain.step_s + 0.5)
    assert forecast(late, at=NOW + 0.1).step_s == forecast(replace(late, rest_s=0.0), at=NOW + 0.1).step_s
