"""Prompts that are computed and wait for room in decode: they count, and stand in nobody's way for ever."""

import asyncio

import pytest

from conductor.admit import Candidate, Judgement, Verdict
from conductor.ask import NO_LIMITS, Limits
from conductor.view import View
from protocol.registry import Pool
from tests.conductor.test_admission import _nothing, an_admission, asked, running
from tests.conductor.test_forecast import a_pool


async def test_who_waits_for_room_counts_for_others_but_not_for_those_who_wait_before_it(
    monkeypatch: pytest.MonkeyPatch,
):
    view = a_pool()
    admission = an_admission(view)
    (decode,) = view.of(Pool.DECODE)
    verdict, there = [Verdict.HOLD], list[int]()

    def judged(candidate: Candidate, view: View, *_: object) -> Judgement:
        there.append(len(decode.streams))
        return Judgement(verdict[0], decode, NO_LIMITS, 0.0)

    monkeypatch.setattr(admission.gate, "hand_over", judged)
    async with running(admission), asyncio.timeout(5.0):
        admitted = [await admission.admit(asked(name), _nothing) for name in ("first", "second")]
        waiting = [asyncio.create_task(admission.hand_over(one, 0)) for one in admitted]
        await asyncio.sleep(0.1)
        assert len(decode.streams) == 2, "both are about to come"
        assert there[-1] == 0
        assert not any(stream.handed_over for stream in decode.streams.values())
        verdict[0] = Verdict.ADMIT
        admission.poke()
        assert await asyncio.gather(*waiting) == [decode] * 2
        assert len(decode.streams) == 2
        for one in admitted:
            one.close()
    assert decode.idle


async def test_a_stricter_limit_than_the_services_makes_nobody_wait_who_was_computed_later(
    monkeypatch: pytest.MonkeyPatch,
):
    admission = an_admission(view := a_pool(), tbt_limit_s=0.5)
    (decode,) = view.of(Pool.DECODE)

    def judged(candidate: Candidate, *_: object) -> Judgement:
        verdict = Verdict.ADMIT if candidate.limits.tbt_s in fitting else Verdict.HOLD
        return Judgement(verdict, decode, NO_LIMITS, 0.0)

    monkeypatch.setattr(admission.gate, "hand_over", judged)
    async with running(admission), asyncio.timeout(5.0):
        fitting = {0.5}
        requests = [asked("strict", tbt_s=0.1), asked("usual", tbt_s=0.5)]
        admitted = [await admission.admit(request, _nothing) for request in requests]
        waiting = [asyncio.create_task(admission.hand_over(one, 0)) for one in admitted]
        assert await waiting[1] is decode
        assert not waiting[0].done()
        fitting.add(0.1)
        assert await waiting[0] is decode
        for one in admitted:
            one.close()


async def test_one_whose_answer_has_begun_meanwhile_waits_behind_nobody(monkeypatch: pytest.MonkeyPatch):
    """Another choice of it, which was a single token, has ended."""
    admission = an_admission(view := a_pool())
    (decode,) = view.of(Pool.DECODE)
    hold = Judgement(Verdict.HOLD, decode, Limits(60.0, 1.0), 0.0)
    monkeypatch.setattr(admission.gate, "hand_over", lambda *_: hold)
    async with running(admission), asyncio.timeout(5.0):
        admitted = [await admission.admit(asked(name), _nothing) for name in ("first", "second")]
        waiting = [asyncio.create_task(admission.hand_over(one, 0)) for one in admitted]
        await asyncio.sleep(0.05)
        admitted[1].wanted.told.tokens = True
        assert await waiting[1] is decode
        assert not waiting[0].done()
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for one in admitted:
            one.close()
    assert decode.idle
