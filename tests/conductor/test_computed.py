"""Prompts that are computed and wait for room in decode: they count, and stand in nobody's way for ever."""

import asyncio

import pytest

from conductor.admit import Candidate, Judgement, Verdict
from conductor.ask import NO_LIMITS
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
