"""What admission promises, it keeps: of a request whose first choice goes on, all do."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from conductor.admission import FULL_RETRY_S, MISSES_MAX, SETTLED_MAX, Admission
from conductor.admit import RETRY_GRID_S, SOON_S, Candidate, Judgement, Verdict
from conductor.admitted import Admitted, Told, Wanted
from conductor.ask import NO_LIMITS, Limits, Priority, Refused
from conductor.config import ConductorConfig
from conductor.metrics import Metrics
from conductor.place import Prompt
from conductor.view import Stream, View
from kvcache_pool.api import Found
from protocol.ids import RequestId
from protocol.registry import Pool
from tests.conductor.test_forecast import a_pool


def an_admission(view: View, **config: object) -> Admission:
    return Admission(view, Metrics("test"), ConductorConfig(**config), random.Random(1))  # type: ignore[arg-type]


def wanted(choices: int) -> Wanted:
    now = asyncio.get_running_loop().time()
    numbers = list(range(choices))
    return Wanted(RequestId("r"), Prompt(10, 0), numbers, Priority.INTERACTIVE, NO_LIMITS, now, now + 10, Told())


async def admitted_by(admission: Admission, choices: int) -> Admitted:
    async def lookup() -> Found:
        return Found(0, {})

    return await admission.admit(wanted(choices), lookup)


async def test_when_one_choice_has_its_place_in_decode_the_others_are_not_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    view = a_pool()
    admission = an_admission(view, admission="at_decode")
    (decode,) = view.of(Pool.DECODE)
    verdicts = [Verdict.ADMIT, Verdict.REFUSE]

    def judged(*_: object) -> Judgement:
        return Judgement(verdicts.pop(0), decode, NO_LIMITS, 0.0, reason="tbt")

    monkeypatch.setattr(admission.gate, "hand_over", judged)
    with await admitted_by(admission, 2) as admitted:
        assert await admission.hand_over(admitted, 0) is decode
        assert await admission.hand_over(admitted, 1) is decode
    assert decode.idle


async def test_when_one_choice_was_refused_in_decode_the_others_are_too(monkeypatch: pytest.MonkeyPatch):
    view = a_pool()
    admission = an_admission(view, admission="at_decode")
    (decode,) = view.of(Pool.DECODE)
    verdicts = [Verdict.REFUSE, Verdict.ADMIT]

    def judged(*_: object) -> Judgement:
        return Judgement(verdicts.pop(0), decode, NO_LIMITS, 0.0, reason="tbt")

    monkeypatch.setattr(admission.gate, "hand_over", judged)
    with await admitted_by(admission, 2) as admitted:
        for choice in (0, 1):
            with pytest.raises(Refused):
                await admission.hand_over(admitted, choice)
    assert decode.idle


def judging(admission: Admission, monkeypatch: pytest.MonkeyPatch, **verdicts: Verdict) -> dict[str, Verdict]:
    """Exchange the gate's judgement of each prompt: by its class and its limit of the time between tokens."""
    table = dict(verdicts)

    def judge(candidate: Candidate, view: View, *_: object) -> Judgement:
        (decode,) = view.of(Pool.DECODE)
        verdict = table.get(f"{candidate.priority.value}_{candidate.limits.tbt_s:g}", Verdict.HOLD)
        return Judgement(verdict, decode, candidate.limits, 0.0, reason="tbt")

    monkeypatch.setattr(admission.gate, "judge", judge)
    return table


def asked(
    name: str,
    *,
    priority: Priority = Priority.INTERACTIVE,
    ttft_s: float = 60.0,
    tbt_s: float = 1.0,
    tokens: int = 10,
) -> Wanted:
    now, limits = asyncio.get_running_loop().time(), Limits(ttft_s, tbt_s)
    return Wanted(RequestId(name), Prompt(tokens, 0), [0], priority, limits, now, now + 100, Told())


async def _nothing() -> Found | None:
    return None


async def _outcome(admission: Admission, request: Wanted) -> str:
    """How an attempt ends: `admitted`, or the reason of its refusal."""
    try:
        with await admission.admit(request, _nothing):
            return "admitted"
    except Refused as refused:
        return refused.refusal.reason


@contextlib.asynccontextmanager
async def running(admission: Admission) -> AsyncIterator[None]:
    task = asyncio.create_task(admission.run())
    yield
    assert not task.done(), "the walk survived"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_hold_ends_with_its_limit_wherever_it_stands(monkeypatch: pytest.MonkeyPatch):
    """Behind more misfits than a walk tries, and in the class that is tried last."""
    admission = an_admission(a_pool())
    judging(admission, monkeypatch)
    async with running(admission), asyncio.timeout(5.0):
        before = [asyncio.create_task(_outcome(admission, asked(f"m{n}", tbt_s=1.0 + n))) for n in range(8)]
        await asyncio.sleep(0)
        assert await _outcome(admission, asked("late", priority=Priority.BATCH, ttft_s=0.3)) == "tbt"
        admission.drain()
        assert await asyncio.gather(*before) == ["draining"] * 8
    admission.check()


async def test_one_with_an_easier_limit_is_tried_behind_an_equal_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    admission = an_admission(a_pool())
    table = judging(admission, monkeypatch)
    async with running(admission), asyncio.timeout(5.0):
        strict = asyncio.create_task(_outcome(admission, asked("strict", tbt_s=0.01)))
        easy = asyncio.create_task(_outcome(admission, asked("easy", tbt_s=0.5)))
        await asyncio.sleep(0.05)
        table["interactive_0.5"] = Verdict.ADMIT
        assert await easy == "admitted"
        assert not strict.done()
        admission.drain()
        assert await strict == "draining"


async def test_however_many_strict_limits_are_out_of_reach_the_others_are_tried(monkeypatch: pytest.MonkeyPatch):
    admission = an_admission(a_pool(), tbt_limit_s=0.5)
    table = judging(admission, monkeypatch)
    async with running(admission), asyncio.timeout(5.0):
        strict = [
            asyncio.create_task(_outcome(admission, asked(f"s{n}", tbt_s=0.01 + 0.001 * n)))
            for n in range(MISSES_MAX + 1)
        ]
        usual = asyncio.create_task(_outcome(admission, asked("usual", tbt_s=0.5)))
        await asyncio.sleep(0.05)
        table["interactive_0.5"] = Verdict.ADMIT
        assert await usual == "admitted"
        assert not any(one.done() for one in strict)
        admission.drain()
        await asyncio.gather(*strict)


async def test_a_burst_that_fits_at_once_does_not_keep_the_conductor_from_all_else(
    monkeypatch: pytest.MonkeyPatch,
):
    admission = an_admission(a_pool())
    table = judging(admission, monkeypatch)
    count = 2 * SETTLED_MAX + 5
    several = [asyncio.create_task(_outcome(admission, asked(f"b{n}"))) for n in range(count)]
    await asyncio.sleep(0.05)
    assert admission.held == count
    table["interactive_1"] = Verdict.ADMIT
    left = []
    async with running(admission), asyncio.timeout(5.0):
        while admission.held:
            await asyncio.sleep(0)
            left.append(admission.held)
        assert await asyncio.gather(*several) == ["admitted"] * count
    assert sorted({count, *left}, reverse=True) == [count, SETTLED_MAX + 5, 5, 0]
    admission.check()


async def test_a_long_prompt_whose_last_moment_has_come_passes_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    """Long is what takes more than two fifths of its limit, by the assumed times."""
    admission = an_admission(a_pool(), ttft_limit_s=6.0)
    judging(admission, monkeypatch, interactive_2=Verdict.ADMIT)
    later = {"ttft_s": 6.0, "tbt_s": 2.0}
    async with running(admission), asyncio.timeout(5.0):
        others = [asyncio.create_task(_outcome(admission, asked("first", ttft_s=5.5)))]
        await asyncio.sleep(0.05)
        others.append(asyncio.create_task(_outcome(admission, asked("short", **later))))
        assert await _outcome(admission, asked("long", tokens=2000, **later)) == "admitted"
        others.append(asyncio.create_task(_outcome(admission, asked("one too many", tokens=2000, **later))))
        await asyncio.sleep(0.3)
        admission.drain()
        assert await asyncio.gather(*others) == ["draining"] * 3
    admission.check()


async def test_however_many_whose_last_moment_has_come_do_not_fit_the_first_is_tried(
    monkeypatch: pytest.MonkeyPatch,
):
    admission = an_admission(a_pool(), ttft_limit_s=6.0)
    table = judging(admission, monkeypatch)
    async with running(admission), asyncio.timeout(5.0):
        first = asyncio.create_task(_outcome(admission, asked("first", ttft_s=5.5)))
        await asyncio.sleep(0.05)
        longs = [
            asyncio.create_task(_outcome(admission, asked(f"l{n}", ttft_s=6.0, tbt_s=2.0 + n, tokens=2000)))
            for n in range(MISSES_MAX + 1)
        ]
        await asyncio.sleep(0.05)
        table["interactive_1"] = Verdict.ADMIT
        assert await first == "admitted"
        assert not any(one.done() for one in longs)
        admission.drain()
        await asyncio.gather(*longs)


async def test_one_whose_last_moment_has_come_hides_no_longer_one_that_stands_before_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """That is cached, and there much sooner: it may fit where the other does not."""
    admission, fits = an_admission(view := a_pool(), ttft_limit_s=6.0), set[int]()
    (decode,) = view.of(Pool.DECODE)

    def judge(candidate: Candidate, *_: object) -> Judgement:
        verdict = Verdict.ADMIT if candidate.tokens in fits else Verdict.HOLD
        return Judgement(verdict, decode, candidate.limits, 0.0)

    async def cached() -> Found:
        return Found(500, {"kvcache-0": 500})

    monkeypatch.setattr(admission.gate, "judge", judge)
    first = replace(asked("first", ttft_s=6.0), prompt=Prompt(2001, 500))
    async with running(admission), asyncio.timeout(2.0):
        waiting = asyncio.create_task(admission.admit(first, cached))
        await asyncio.sleep(0.05)
        long = asyncio.create_task(_outcome(admission, asked("long", ttft_s=6.0, tokens=2000)))
        await asyncio.sleep(0.05)
        fits.add(2001)
        (await waiting).close()
        assert not long.done()
        admission.drain()
        assert await long == "draining"


async def test_the_step_after_one_has_joined_is_longer_for_a_rest_that_is_computed_beside_it():
    admission = an_admission(view := a_pool())
    (decode,) = view.of(Pool.DECODE)
    with await admitted_by(admission, 1) as admitted:
        due_at = asyncio.get_running_loop().time() + 1.0
        view.enter(decode, (RequestId("rest"), 0), Stream(100, due_at, joined_at=0.0, rest_s=0.25))
        step_s = admission.estimates.step(decode.kind).at(2, 100 + 10)
        assert admission.joined(admitted, 0) == pytest.approx(step_s + 0.25)


async def test_computed_prompts_go_on_in_the_order_in_which_they_were_computed(monkeypatch: pytest.MonkeyPatch):
    """Behind one that does not fit only those move whose time is up."""
    view = a_pool()
    admission = an_admission(view)
    (decode,) = view.of(Pool.DECODE)
    fits = {"small"}

    def judged(candidate: Candidate, *_: object) -> Judgement:
        fit = "large" if candidate.tokens > 1 else "small"
        over = asyncio.get_running_loop().time() > candidate.arrived_at + candidate.limits.ttft_s - SOON_S
        return Judgement(Verdict.ADMIT if fit in fits or over else Verdict.HOLD, decode, candidate.limits, 0.0)

    def a_request(name: str, tokens: int, ttft_s: float = 60.0) -> Wanted:
        now, limits = asyncio.get_running_loop().time(), Limits(ttft_s, 1.0)
        prompt = Prompt(tokens, 0)
        return Wanted(RequestId(name), prompt, [0], Priority.INTERACTIVE, limits, now, now + 100, Told())

    monkeypatch.setattr(admission.gate, "hand_over", judged)
    requests = [a_request("first", 9), a_request("second", 1), a_request("hurried", 1, SOON_S + 0.3)]
    async with running(admission), asyncio.timeout(5.0):
        admitted = [await admission.admit(request, _nothing) for request in requests]
        waiting = [asyncio.create_task(admission.hand_over(one, 0)) for one in admitted]
        assert await waiting[2] is decode
        assert not any(one.done() for one in waiting[:2])
        fits.add("large")
        assert await asyncio.gather(*waiting) == [decode] * 3
        for one in admitted:
            one.close()
    assert decode.idle


async def test_a_client_that_leaves_in_the_turn_of_the_walk_does_not_end_the_walk(monkeypatch: pytest.MonkeyPatch):
    view = a_pool()
    admission = an_admission(view, admission="at_decode")
    (decode,) = view.of(Pool.DECODE)
    verdict = [Verdict.HOLD]
    monkeypatch.setattr(
        admission.gate, "hand_over", lambda *_: Judgement(verdict[0], decode, NO_LIMITS, 0.0, reason="tbt")
    )
    async with running(admission):
        with await admitted_by(admission, 1) as admitted:
            waiting = asyncio.create_task(admission.hand_over(admitted, 0))
            await asyncio.sleep(0.1)
            verdict[0] = Verdict.ADMIT
            waiting.cancel()
            admission._computed.walk()
            await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.05)
    assert decode.idle


async def test_one_whose_answer_has_begun_meanwhile_is_not_held_any_longer(monkeypatch: pytest.MonkeyPatch):
    """Another choice of the same request has sent its first token: none may be refused now."""
    admission = an_admission(a_pool())
    judging(admission, monkeypatch)
    async with running(admission), asyncio.timeout(5.0):
        request = asked("r")
        waiting = asyncio.create_task(_outcome(admission, request))
        await asyncio.sleep(0.05)
        request.told.tokens = True
        admission.poke()
        assert await waiting == "admitted"
    admission.check()


async def test_a_class_is_held_up_as_long_as_somebody_of_it_waits_or_runs(monkeypatch: pytest.MonkeyPatch):
    view = a_pool()
    admission = an_admission(view, hysteresis=0.2)
    judging(admission, monkeypatch)
    closed = admission.gate._closed
    (decode,) = view.of(Pool.DECODE)
    view.enter(decode, (RequestId("b"), 0), Stream(10, 0.0, Priority.BATCH))
    async with running(admission), asyncio.timeout(5.0):
        closed.update(Priority)
        waiting = asyncio.create_task(_outcome(admission, asked("i")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert closed == {Priority.BATCH}, "one of them runs, and of the other nobody was there before this one"
        closed.update(Priority)
        await asyncio.sleep(0.05)
        assert closed == set(Priority), "it is held"
        view.release(decode, (RequestId("b"), 0), 0.0)
        admission.poke()
        await asyncio.sleep(0.05)
        assert closed == {Priority.INTERACTIVE}
        admission.drain()
        assert await waiting == "draining"


async def test_who_finds_the_line_full_is_told_how_long_those_who_stand_there_take(
    monkeypatch: pytest.MonkeyPatch,
):
    view = a_pool()
    admission = an_admission(view, held_max=2)
    judging(admission, monkeypatch)
    (decode,) = view.of(Pool.DECODE)
    view.enter(decode, (RequestId("b"), 0), Stream(100, 0.0, joined_at=0.0))
    async with running(admission), asyncio.timeout(5.0):
        held = [asyncio.create_task(_outcome(admission, asked(f"h{n}"))) for n in range(2)]
        await asyncio.sleep(0.05)
        for residence_s, retry_s in ((0.0, FULL_RETRY_S), (10.0, 2 * 10.0), (1000.0, RETRY_GRID_S[-1])):
            if residence_s:
                admission.gate._residence.value, admission.gate._residence.samples = residence_s, 1
            with pytest.raises(Refused) as refused:
                await admission.admit(asked("more"), _nothing)
            assert (refused.value.refusal.reason, refused.value.refusal.retry_after_s) == ("queue_full", retry_s)
        admission.drain()
        await asyncio.gather(*held)


async def test_batch_that_stands_before_interactive_requests_is_judged_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else all of them would wait until the share that is kept for them is empty."""
    admission = an_admission(view := a_pool(), batch_age_s=0.2)
    (decode,) = view.of(Pool.DECODE)
    monkeypatch.setattr(
        admission.gate,
        "judge",
        lambda candidate, *_: Judgement(
            Verdict.ADMIT if candidate.aged else Verdict.HOLD, decode, candidate.limits, 0.0
        ),
    )
    async with running(admission), asyncio.timeout(5.0):
        interactive = asyncio.create_task(_outcome(admission, asked("i", ttft_s=0.5)))
        assert await _outcome(admission, asked("b", priority=Priority.BATCH, tbt_s=0.01)) == "admitted"
        assert await interactive == "tbt", "that one never ages"
