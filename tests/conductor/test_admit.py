"""Who is let in, held and refused, by which policy; more load, less time, or a stricter limit never helps."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.admit import (
    LEARN_S,
    NEAR_S,
    RETRY_GRID_S,
    SOON_S,
    Candidate,
    Gate,
    Judgement,
    Verdict,
)
from conductor.ask import NO_LIMITS, Limits, Priority
from conductor.estimate import StepLine
from conductor.lengths import Lengths
from conductor.rules import POLICIES, Rules
from conductor.view import STALE_REPORTS, Stream, View
from protocol.ids import RequestId
from protocol.registry import REPORT_EVERY_S, Load, Pool
from tests.conductor.test_forecast import NOW, STEP_S, SameForAll, a_pool, coming, enter, running, streams
from tests.conductor.test_view import the

LIMITS = Limits(ttft_s=10.0, tbt_s=0.050)
"""With 2 ms for each stream of 1000 tokens, and 10 ms for all, 20 of them fit."""

ADMIT, HOLD, REFUSE = Verdict.ADMIT, Verdict.HOLD, Verdict.REFUSE
BATCH = Priority.BATCH


def learnt() -> Lengths:
    """Answers of 1 to 400 tokens, all equally likely."""
    lengths = Lengths()
    for n in range(400):
        lengths.observe(Priority.INTERACTIVE, n % 400 + 1)
    return lengths


LENGTHS = learnt()


def a_candidate(**more: object) -> Candidate:
    """Just arrived; its prefill would be done in 2 s."""
    candidate = Candidate(1000, Priority.INTERACTIVE, LIMITS, NOW, queue_s=1.0, compute_s=1.0)
    return replace(candidate, **more)  # type: ignore[arg-type]


def a_gate(policy: str = "survival", **more: object) -> Gate:
    return Gate(Rules(policy, **more))  # type: ignore[arg-type]


def busy(count: int, decodes: int = 1, blocks: int = 0, **more: object) -> View:
    """So many streams on each decode instance, which go on for at least a while."""
    view = a_pool(decodes, blocks)
    for instance in view.of(Pool.DECODE):
        enter(view, instance.name, *[running(**more) for _ in range(count)])
    return view


def judged(gate: Gate, view: View, fresh: int = 100, **candidate: object) -> Judgement:
    return gate.judge(a_candidate(**candidate), view, SameForAll(fresh=fresh), LENGTHS, NOW)


def handed(gate: Gate, view: View, fresh: int = 100, **candidate: object) -> Judgement:
    return gate.hand_over(a_candidate(**candidate), view, SameForAll(fresh=fresh), LENGTHS, NOW)


def test_an_unknown_policy_is_refused_with_the_names_of_the_known_ones():
    with pytest.raises(ValueError, match="none, at_decode, early, predictive, survival, not 'perhaps'"):
        Rules("perhaps")


# --- the time to first token


def test_a_late_first_token_is_refused_with_the_prediction_and_its_limit():
    judgement = judged(a_gate(), a_pool(), queue_s=10.0, compute_s=1.0, arrived_at=NOW - 1)
    assert (judgement.verdict, judgement.reason, judgement.ttft_s) == (REFUSE, "ttft", 12.0)
    refusal = judgement.refusal(429)
    assert (refusal.reason, refusal.status, refusal.ttft_s, refusal.tbt_s) == ("ttft", 429, 12.0, None)
    assert refusal.limits == LIMITS
    assert "too late" in refusal.text, "the edge adds both numbers"
    assert refusal.retry_after_s == 1.0, "by then the queue of 10 s will be one of 9"


def test_who_asks_again_too_soon_is_told_the_bounds():
    def late(queue_s: float, compute_s: float) -> float:
        arrived_at = NOW - 5
        return judged(
            a_gate(), a_pool(), queue_s=queue_s, compute_s=compute_s, arrived_at=arrived_at
        ).retry_after_s

    assert late(6, 1) == RETRY_GRID_S[0], "a newcomer would be in time at once"
    assert late(1000, 1) == RETRY_GRID_S[-1]
    assert late(0, 11) == RETRY_GRID_S[-1], "its prefill alone is too long, whenever it asks"


def test_a_margin_makes_the_limit_soft():
    assert judged(a_gate(margin=0.1), a_pool(), queue_s=9.9).verdict is ADMIT
    assert judged(a_gate(margin=0.1), a_pool(), queue_s=10.1).verdict is REFUSE


def test_without_fresh_samples_nothing_is_refused_by_prediction():
    """Too few samples mean unknown, and what is not known is not full."""
    assert judged(a_gate(), busy(100), fresh=7, queue_s=100.0, arrived_at=NOW - LEARN_S).verdict is ADMIT
    assert judged(a_gate(), busy(0), fresh=8, queue_s=100.0).verdict is REFUSE
    assert judged(a_gate(), busy(100), fresh=8).verdict is HOLD


def test_while_a_pace_is_unknown_it_waits_a_moment_for_what_runs_to_tell_it():
    gate, running_there = a_gate(), busy(1)
    assert judged(gate, running_there, fresh=7).verdict is HOLD
    assert judged(gate, running_there, fresh=8).verdict is ADMIT
    assert judged(gate, running_there, fresh=7, arrived_at=NOW - LEARN_S).verdict is ADMIT, "nothing tells it"
    assert judged(a_gate(hold=False), running_there, fresh=7).verdict is ADMIT
    assert judged(gate, busy(0), fresh=0).verdict is ADMIT, "an idle service serves at once"
    on_its_way = busy(0)
    enter(on_its_way, "decode-0", coming())
    assert judged(gate, on_its_way, fresh=0).verdict is ADMIT, (
        "that tells nothing for as long as its prefill takes"
    )


def test_time_that_has_gone_is_no_prediction():
    assert judged(a_gate(), a_pool(), fresh=0, arrived_at=NOW - 10.1).reason == "ttft"


def test_before_it_is_placed_only_the_time_that_it_waited_counts():
    judgement = judged(a_gate(), a_pool(), queue_s=None, compute_s=None, arrived_at=NOW - 3)
    assert (judgement.verdict, judgement.ttft_s) == (ADMIT, 3.0)


# --- the time between tokens, and memory


def test_who_fits_is_admitted_where_the_step_is_least():
    view = busy(3, decodes=2)
    enter(view, "decode-0", running())
    judgement = judged(a_gate(), view)
    assert judgement.verdict is ADMIT
    assert judgement.decode is the(view, "decode-1")
    assert (judgement.reason, judgement.text, judgement.retry_after_s) == ("", "", 0)
    assert judgement.tbt_s is not None
    assert 0.012 < judgement.tbt_s < 0.022


def test_who_does_not_fit_is_held_or_refused():
    view = busy(60)
    held, refused = judged(a_gate(), view), judged(a_gate(hold=False), view)
    assert (held.verdict, held.reason, held.retry_after_s) == (HOLD, "tbt", 0)
    assert held.decode is the(view, "decode-0")
    assert (refused.verdict, refused.reason, refused.decode) == (REFUSE, "tbt", None)
    assert "between tokens" in refused.text
    assert "0.05 s" in refused.text
    assert refused.tbt_s == held.tbt_s


def test_it_is_held_only_if_no_instance_takes_it():
    view = busy(60, decodes=2)
    the(view, "decode-1").streams.clear()
    assert judged(a_gate(), view).decode is the(view, "decode-1")


def test_memory_is_a_reason_too():
    judgement = judged(a_gate(hold=False), busy(1, blocks=500), tokens=3000)
    assert (judgement.verdict, judgement.reason) == (REFUSE, "tbt")
    assert "memory" in judgement.text
    assert judged(a_gate(), busy(1, blocks=5000), tokens=3000).verdict is ADMIT


AT_ONCE = {"queue_s": 0.0, "compute_s": 0.0}


def test_retry_after_is_when_an_equal_request_is_expected_to_fit():
    """30 streams are at 300 tokens of at most 400, at 50 a second: in 1 s half are left, in 2 s none."""

    def retry_s(view: View, z: float = 0.0, **candidate: object) -> float:
        judgement = judged(a_gate(hold=False, z=z), view, **AT_ONCE, **candidate)
        assert judgement.verdict is REFUSE
        return judgement.retry_after_s

    assert retry_s(busy(30, said=300)) == 1.0
    assert retry_s(busy(30, said=300), z=2.0) == 2.0, "half of them, but it may well be a few more"
    assert retry_s(busy(30, said=0)) == 4.0, "young ones stay longer"
    assert retry_s(busy(1), tokens=10**6) == RETRY_GRID_S[-1], "it will never fit"


def test_who_comes_back_stands_behind_those_who_are_held():
    gate, view = a_gate(hold=False), busy(20, said=0)
    soon_s = judged(gate, view, **AT_ONCE).retry_after_s
    line = {"waiting": 10, "waiting_tokens": 10_000}
    assert judged(gate, view, **AT_ONCE, **line).retry_after_s == soon_s, "nobody has left decode yet"
    gate.observe_residence(8.0)
    assert judged(gate, view, **AT_ONCE, **line).retry_after_s == soon_s + 4.0, (
        "half of what runs takes half as long"
    )
    long = {"waiting": 2, "waiting_tokens": 15_000}
    assert judged(gate, view, **AT_ONCE, **long).retry_after_s == soon_s + 6.0, "few, but of long prompts"
    assert judged(gate, view, **AT_ONCE, waiting=1000).retry_after_s == RETRY_GRID_S[-1]
    late = {"queue_s": 12.0, "compute_s": 1.0}
    assert judged(gate, view, **late, **line).retry_after_s == 3.0 + 4.0
    assert gate.drain_s(a_pool(), 10, 10_000) == 0.0


def test_an_empty_instance_takes_whoever_could_be_served_at_all():
    alone_s = 0.010 + 0.002
    for priority in Priority:
        gate = a_gate(hysteresis=0.5, batch_share=0.5)
        assert judged(gate, busy(60), priority=priority).verdict is HOLD
        just = Limits(10.0, alone_s * 1.001)
        assert judged(gate, a_pool(), priority=priority, limits=just).verdict is ADMIT
        never = Limits(10.0, alone_s * 0.999)
        assert judged(a_gate(hold=False), a_pool(), priority=priority, limits=never).reason == "tbt"
        assert judged(a_gate(), a_pool(blocks=1), priority=priority, tokens=3000).verdict is ADMIT


def test_what_others_were_promised_binds_who_comes_later():
    strict = busy(10, tbt_s=0.025)
    assert judged(a_gate(), strict, limits=NO_LIMITS).verdict is HOLD
    assert judged(a_gate(), busy(10, tbt_s=0.040), limits=NO_LIMITS).verdict is ADMIT
    assert judged(a_gate(), busy(1000), limits=NO_LIMITS).verdict is ADMIT


def test_batch_may_fill_its_share_only():
    view = busy(16, said=0)
    assert judged(a_gate(), view, **AT_ONCE).verdict is ADMIT, "17 of them: 44 ms"
    assert judged(a_gate(), view, priority=BATCH, **AT_ONCE).verdict is HOLD
    assert judged(a_gate(batch_share=0.9), view, priority=BATCH, **AT_ONCE).verdict is ADMIT
    assert judged(a_gate(), view, priority=BATCH, aged=True, **AT_ONCE).verdict is ADMIT, "none stand before it"
    pages = 4800 // view.manifest.layout.block_tokens
    large = {"tokens": 3000, "limits": NO_LIMITS, **AT_ONCE}  # and 200 that it will say, and 1000 of the other
    assert judged(a_gate(), busy(1, said=0, blocks=pages), **large).verdict is ADMIT
    assert judged(a_gate(), busy(1, said=0, blocks=pages), priority=BATCH, **large).verdict is HOLD


def test_batch_does_not_go_to_a_prefill_queue_where_interactive_requests_would_stand_behind_it():
    """B39 (c)."""
    gate, view = a_gate(), busy(0)
    far, near = {"queue_s": 1.1 * NEAR_S}, {"queue_s": NEAR_S}
    assert judged(gate, view, priority=BATCH, yields=True, **far).verdict is HOLD
    assert judged(gate, view, priority=BATCH, yields=True, **near).verdict is ADMIT
    assert judged(gate, view, priority=BATCH, **far).verdict is ADMIT, "it has waited long"
    assert judged(a_gate(hold=False), view, priority=BATCH, yields=True, **far).verdict is ADMIT
    assert judged(a_gate("none"), view, priority=BATCH, yields=True, **far).verdict is ADMIT


def test_once_closed_a_gate_opens_only_with_some_room():
    gate = a_gate(hysteresis=0.2)
    assert judged(gate, busy(17, said=0), **AT_ONCE).verdict is ADMIT
    assert judged(gate, busy(20, said=0), **AT_ONCE).verdict is HOLD
    assert judged(gate, busy(17, said=0), **AT_ONCE).verdict is HOLD, "46 ms, and 40 are allowed now"
    assert judged(gate, busy(13, said=0), **AT_ONCE).verdict is ADMIT
    assert judged(gate, busy(17, said=0), **AT_ONCE).verdict is ADMIT


def test_a_closed_gate_opens_for_a_class_of_which_nobody_is_left():
    gate = a_gate(hysteresis=0.2)
    assert judged(gate, busy(30, said=0), **AT_ONCE).verdict is HOLD
    gate.reopen({Priority.INTERACTIVE})
    assert judged(gate, busy(17, said=0), **AT_ONCE).verdict is HOLD, "somebody is there"
    gate.reopen({BATCH})
    assert not gate.closed
    assert judged(gate, busy(17, said=0), **AT_ONCE).verdict is ADMIT


def test_batch_that_does_not_fit_closes_the_gate_for_batch_alone():
    gate = a_gate(hysteresis=0.2, batch_share=0.9)
    assert judged(gate, busy(20, said=0), priority=BATCH, **AT_ONCE).verdict is HOLD
    assert judged(gate, busy(15, said=0), priority=BATCH, **AT_ONCE).verdict is HOLD
    assert judged(gate, busy(17, said=0), **AT_ONCE).verdict is ADMIT


def test_who_was_held_until_its_time_ran_out_is_refused_for_what_it_waited_for():
    view = busy(60)
    judgement = judged(a_gate(), view, arrived_at=NOW - 9, held=True)
    assert (judgement.verdict, judgement.reason) == (REFUSE, "tbt")
    assert judgement.tbt_s is not None
    assert judgement.retry_after_s > 0
    assert "no room" in judgement.text
    queued = {"priority": BATCH, "yields": True, "queue_s": 2 * NEAR_S}
    assert judged(a_gate(), view, arrived_at=NOW - 9, held=True, **queued).reason == "ttft", (
        "for its turn in prefill"
    )
    view.leave(the(view, "decode-0").name, the(view, "decode-0").incarnation)
    assert judged(a_gate(), view, arrived_at=NOW - 9, held=True).reason == "ttft"


# --- the policies


def test_none_admits_everything():
    judgement = judged(a_gate("none"), busy(1000), queue_s=1e6)
    assert judgement.verdict is ADMIT
    assert judgement.decode is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_without_decode_there_is_nothing_to_judge_by(policy: str):
    """That nobody is alive is said by placement, with another status."""
    for judgement in (judged(a_gate(policy), a_pool(0)), handed(a_gate(policy), a_pool(0))):
        assert (judgement.verdict, judgement.decode, judgement.tbt_s) == (ADMIT, None, None)


def only(policy: str, *there: Stream, reserve: bool = False, limits: Limits = LIMITS, **rules: object) -> Verdict:
    """A verdict with 30 times `there` on the only instance."""
    view = a_pool()
    enter(view, "decode-0", *(stream for stream in there for _ in range(30)))
    gate = a_gate(policy, reserve=reserve, hold=False, **rules)
    return judged(gate, view, limits=limits).verdict


def test_early_sees_who_runs_now_and_nothing_else():
    assert only("early", running(said=399, since=100)) is REFUSE
    assert only("early", coming(in_s=0.1)) is ADMIT
    assert only("early", coming(in_s=0.1), reserve=True) is REFUSE


def test_predictive_sees_who_has_not_had_its_time():
    assert only("predictive", running(since=4), residence_s=7.0) is REFUSE
    assert only("predictive", running(since=4), residence_s=5.0) is ADMIT
    assert only("predictive", coming(in_s=1), residence_s=5.0) is REFUSE
    assert only("predictive", coming(in_s=3), residence_s=5.0) is ADMIT
    assert only("predictive", coming(in_s=3), residence_s=5.0, reserve=True) is REFUSE


def test_predictive_takes_the_mean_of_what_it_saw_if_it_is_not_told():
    gate, view = a_gate("predictive", reserve=False), busy(30, since=4)
    assert judged(gate, view).verdict is HOLD, "nobody has ended yet, as far as is known"
    gate.observe_residence(4.0)
    assert judged(gate, view).verdict is ADMIT
    gate.observe_residence(10.0)
    assert judged(gate, view).verdict is HOLD


def test_survival_sees_who_is_likely_to_go_on():
    assert only("survival", running(said=0)) is REFUSE
    assert only("survival", running(said=395)) is ADMIT
    assert only("survival", coming(in_s=1)) is REFUSE
    assert only("survival", coming(in_s=3)) is ADMIT
    assert only("survival", coming(in_s=3), reserve=True) is REFUSE


def test_reserve_is_careful_where_survival_is_doubtful():
    doubtful = running(said=200)  # after 100 more tokens, half of the 30 are expected: 42 ms in all
    assert only("survival", doubtful) is ADMIT
    assert only("survival", doubtful, reserve=True, z=0.0) is ADMIT
    assert only("survival", doubtful, reserve=True, z=3.0) is REFUSE


def test_a_size_blind_test_takes_each_prompt_for_a_mean_one():
    gate = a_gate(size_blind=True)
    assert judged(gate, busy(1), tokens=100_000).verdict is REFUSE, "no mean yet, and it fits on no empty instance"
    for tokens in (500, 1500):
        gate.observe_prompt(tokens)
    judgements = [judged(gate, busy(1), tokens=tokens) for tokens in (10, 100_000)]
    assert judgements[0].tbt_s == judgements[1].tbt_s
    assert {judgement.verdict for judgement in judgements} == {ADMIT}


# --- at the hand-over


def test_the_baseline_tests_decode_only_when_the_prefill_is_done():
    gate, full = a_gate("at_decode"), busy(30)
    assert judged(gate, full).verdict is ADMIT
    assert judged(gate, full, queue_s=100.0).reason == "ttft"
    assert handed(gate, full, arrived_at=NOW - 9).verdict is HOLD
    over = handed(gate, full, arrived_at=NOW - 11)
    assert (over.verdict, over.reason) == (REFUSE, "tbt")
    assert handed(gate, busy(10), arrived_at=NOW - 11).verdict is ADMIT
    assert handed(gate, full, fresh=0, arrived_at=NOW - LEARN_S).verdict is ADMIT


def test_the_baseline_counts_who_was_handed_over_a_moment_ago_but_no_one_in_prefill():
    view = a_pool()
    enter(view, "decode-0", *[coming(in_s=1)] * 60)
    assert handed(a_gate("at_decode"), view).verdict is ADMIT
    enter(view, "decode-0", *[replace(coming(in_s=0), handed_over=True)] * 60)
    assert handed(a_gate("at_decode"), view).verdict is HOLD


@pytest.mark.parametrize("policy", ["early", "predictive", "survival"])
def test_one_that_was_promised_room_waits_for_it_at_the_hand_over_until_its_limit_is_near(policy: str):
    """And is never refused there; nor does anybody new wait behind a class that is held up."""
    gate, full = a_gate(policy), busy(20)
    waits = handed(gate, full, arrived_at=NOW - 9)
    assert (waits.verdict, waits.reason) == (HOLD, "tbt")
    assert handed(gate, full, arrived_at=NOW - 10 + SOON_S / 2).verdict is ADMIT
    assert handed(gate, full, arrived_at=NOW - 99).verdict is ADMIT
    assert handed(gate, full, fresh=0, arrived_at=NOW - 9).verdict is ADMIT
    assert handed(gate, busy(18), arrived_at=NOW - 9).verdict is ADMIT
    assert handed(gate, busy(18), arrived_at=NOW - 9, priority=BATCH).verdict is ADMIT, (
        "promised, of whatever class"
    )
    assert handed(a_gate(policy, hold=False), full, arrived_at=NOW - 9).verdict is ADMIT


def test_one_that_was_promised_room_waits_for_memory_too_but_not_on_an_empty_instance():
    small = busy(1, blocks=100)
    assert handed(a_gate(), small).verdict is HOLD
    assert handed(a_gate(), a_pool(blocks=50)).verdict is ADMIT


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"at_decode"}))
def test_others_keep_their_promise_and_choose_the_best_instance_of_that_moment(policy: str):
    view = busy(60, decodes=2)
    enter(view, "decode-0", *[coming(in_s=0, handed_over=True)] * 10)
    enter(view, "decode-1", *[coming(in_s=30)] * 30)  # these will choose for themselves
    judgement = handed(a_gate(policy), view, arrived_at=NOW - 100)
    assert judgement.verdict is ADMIT
    assert judgement.decode is the(view, "decode-1")


def test_all_in_one_go_do_not_herd():
    view, went = a_pool(3), []
    for n in range(9):
        instance = judged(a_gate(), view).decode
        assert instance is not None
        view.enter(instance, (RequestId(f"new{n}"), 0), coming(in_s=2))
        went.append(instance.name)
    assert went == ["decode-0", "decode-1", "decode-2"] * 3


# --- properties

ledgers = st.lists(st.lists(streams(), max_size=30), min_size=1, max_size=4)


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    """Any rules but those of `none`, which look at nothing."""
    return Rules(
        draw(st.sampled_from([policy for policy in POLICIES if policy != "none"])),
        reserve=draw(st.booleans()),
        hold=draw(st.booleans()),
        z=draw(st.floats(0, 3)),
        margin=draw(st.floats(0, 0.5)),
        hysteresis=draw(st.floats(0, 0.5)),
        residence_s=draw(st.floats(0, 20)),
        batch_share=draw(st.floats(0.1, 1)),
        size_blind=draw(st.booleans()),
    )


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """Anybody who may come at NOW."""
    return Candidate(
        draw(st.integers(1, 50_000)),
        draw(st.sampled_from(Priority)),
        Limits(draw(st.sampled_from([1.0, 10.0, math.inf])), draw(st.sampled_from([0.02, 0.05, 0.1, math.inf]))),
        NOW - draw(st.floats(0, 12)),
        draw(st.none() | st.floats(0, 10)),
        draw(st.none() | st.floats(0, 5)),
        choices=draw(st.integers(1, 3)),
        held=draw(st.booleans()),
    )


def a_view_of(several: list[list[Stream]]) -> View:
    view = a_pool(len(several), blocks=5000)
    for n, ledger in enumerate(several):
        enter(view, f"decode-{n}", *ledger)
    return view


WORST = {ADMIT: 0, HOLD: 1, REFUSE: 2}


def verdicts(rules: Rules, candidate: Candidate, view: View) -> list[int]:
    """On arrival and at the hand-over, each by a gate that has seen nothing; more is worse."""
    made = [
        judge(candidate, view, SameForAll(), LENGTHS, NOW).verdict
        for judge in (Gate(rules).judge, Gate(rules).hand_over)
    ]
    return [WORST[verdict] for verdict in made]


def refusals(rules: Rules, candidate: Candidate, view: View) -> list[int]:
    """The same where a refusal is possible: at the hand-over only by `at_decode`. With other policies it is sooner
    there that one may wait no longer and goes on, room or not."""
    made = verdicts(rules, candidate, view)
    return made if rules.policy == "at_decode" else made[:1]


def no_better(after: list[int], before: list[int]) -> bool:
    return all(later >= earlier for later, earlier in zip(after, before, strict=True))


@given(rules(), candidates(), ledgers, streams(), st.integers(0, 3))
def test_another_stream_never_gets_anybody_in(rules, candidate, several, another, where):
    more = [[*ledger, another] if n == where % len(several) else ledger for n, ledger in enumerate(several)]
    before = verdicts(rules, candidate, a_view_of(several))
    assert no_better(verdicts(rules, candidate, a_view_of(more)), before)


@given(rules(), candidates(), ledgers, st.integers(1, 5000))
def test_longer_contexts_never_get_anybody_in(rules, candidate, several, longer):
    grown = [[replace(stream, context=stream.context + longer) for stream in ledger] for ledger in several]
    before = verdicts(rules, candidate, a_view_of(several))
    assert no_better(verdicts(rules, candidate, a_view_of(grown)), before)


@given(rules(), candidates(), ledgers, st.floats(0.1, 1), st.floats(0.1, 1))
def test_stricter_limits_never_get_anybody_in(rules, candidate, several, ttft, tbt):
    limits = Limits(candidate.limits.ttft_s * ttft, candidate.limits.tbt_s * tbt)
    before = refusals(rules, candidate, a_view_of(several))
    assert no_better(refusals(rules, replace(candidate, limits=limits), a_view_of(several)), before)


@given(rules(), candidates(), ledgers, st.floats(0, 20))
def test_having_waited_longer_never_gets_anybody_in(rules, candidate, several, longer):
    older = replace(candidate, arrived_at=candidate.arrived_at - longer)
    before = refusals(rules, candidate, a_view_of(several))
    assert no_better(refusals(rules, older, a_view_of(several)), before)


@given(rules(), candidates(), ledgers)
def test_batch_is_let_in_no_sooner_than_interactive(rules, candidate, several):
    view = a_view_of(several)
    interactive = verdicts(rules, replace(candidate, priority=Priority.INTERACTIVE), view)
    assert no_better(verdicts(rules, replace(candidate, priority=BATCH), view), interactive)


@given(rules(), st.lists(candidates(), min_size=1, max_size=5), ledgers)
def test_each_judgement_is_one_verdict_that_says_what_belongs_to_it(rules, several, ledger):
    """And the same history makes the same judgements."""
    one, other, view = Gate(rules), Gate(rules), a_view_of(ledger)
    for candidate in several:
        for judge, again in ((one.judge, other.judge), (one.hand_over, other.hand_over)):
            judgement = judge(candidate, view, SameForAll(), LENGTHS, NOW)
            assert judgement == again(candidate, view, SameForAll(), LENGTHS, NOW)
            refused, admitted = judgement.verdict is REFUSE, judgement.verdict is ADMIT
            assert (judgement.reason == "", judgement.text == "") == (admitted, admitted)
            assert (judgement.decode is None) == refused
            assert (RETRY_GRID_S[0] <= judgement.retry_after_s <= RETRY_GRID_S[-1]) == refused


@given(rules(), candidates(), ledgers, st.integers(0, 10**6), st.integers(0, 10**9))
def test_a_stale_report_changes_nothing(rules, candidate, several, count, context):
    view = a_view_of(several)
    quiet = verdicts(rules, candidate, view)
    load = Load(running=count, waiting=count, context_tokens=context, step_s=STEP_S, blocks_total=5000)
    for instance in view.of(Pool.DECODE):
        assert view.report(instance.name, instance.incarnation, load, NOW - STALE_REPORTS * REPORT_EVERY_S - 0.1)
    assert verdicts(rules, candidate, view) == quiet


@given(candidates(), ledgers, st.floats(0, 3))
def test_a_line_that_costs_more_never_gets_anybody_in(candidate, several, dearer):
    line, view = StepLine(0.010, 0.001, 1e-6), a_view_of(several)
    dear = SameForAll(StepLine(*(part * (1 + dearer) for part in line)))
    before = WORST[Gate(Rules()).judge(candidate, view, SameForAll(line), LENGTHS, NOW).verdict]
    assert WORST[Gate(Rules()).judge(candidate, view, dear, LENGTHS, NOW).verdict] >= before
