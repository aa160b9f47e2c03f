"""What admission promises, it keeps: of a request whose first choice goes on, all do."""

import asyncio
import random

import pytest

from conductor.admission import Admission
from conductor.admit import Judgement, Verdict
from conductor.admitted import Admitted, Wanted
from conductor.ask import NO_LIMITS, Priority, Refused
from conductor.config import ConductorConfig
from conductor.metrics import Metrics
from conductor.place import Prompt
from conductor.view import View
from kvcache_pool.api import Found
from protocol.ids import RequestId
from protocol.registry import Pool
from tests.conductor.test_forecast import a_pool


def an_admission(view: View, **config: object) -> Admission:
    return Admission(view, Metrics("test"), ConductorConfig(**config), random.Random(1))  # type: ignore[arg-type]


def wanted(choices: int) -> Wanted:
    now = asyncio.get_running_loop().time()
    numbers = list(range(choices))
    return Wanted(RequestId("r"), Prompt(10, 0), numbers, Priority.INTERACTIVE, NO_LIMITS, now, now + 10)


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
