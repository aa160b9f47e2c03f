"""B43 (b): a steady load of 1.3 times what can be served, with long decodes, for two minutes of virtual time after
a warm-up: who is let in does not swing between everybody and nobody, nor do the pools against each other."""

from collections import Counter
from dataclasses import replace
from statistics import correlation
from typing import Any

import pytest

from simulator.drive import Run, simulate
from simulator.record import swing
from simulator.setup import Setup
from simulator.synthetic import LogNormal, Phase

WATCHED_S = 120.0
WINDOW_S = 20
POINTS = 0.20
"""How far the share of accepted requests may be from its mean in any window."""

IDLE = 0.8
"""A pool whose load is below has room: at 1 its limit is reached."""

SWINGS = 0.1
"""A load that moves by more than this share of its limit; what moves less does not swing against anything."""


def a_setup(rate: float, tokens: float, output: float, warm_s: float, tbt_limit_s: float = 0.032) -> Setup:
    phase = Phase(warm_s + WATCHED_S, rate, LogNormal(tokens, 0.5), LogNormal(output, 0.5), cv=0.2)
    return Setup(phases=(phase,), prefill=1, decode=1, tbt_limit_s=tbt_limit_s)


PREFILL_BINDS = a_setup(3.5, 4000, 500, 120.0)
"""Decode takes 25 times as long as prefill, and is nearly full."""

DECODE_BINDS = a_setup(2.4, 4000, 800, 240.0)
"""Until a hundred answers have ended they are taken for much shorter: a long warm-up."""

CONTROL = Setup(
    phases=(Phase(120.0 + WATCHED_S, 2.6, LogNormal(32_000, 0.01), LogNormal(343, 0.5), cv=0.2),),
    prefill=8,
    decode=1,
    tbt_limit_s=0.05,
    admission="early",
    reserve=False,
    hold=False,
)
"""Early rejection by the load of now, where what it lets in reaches decode four seconds later."""

DEFAULT: dict[str, Any] = {"admission": "survival", "reserve": True, "hold": True}


def faults_of(run: Run) -> list[str]:
    """What is not steady in the watched time."""
    series, (phase,) = run.series, run.setup.phases
    begin, end = phase.span_s - WATCHED_S, phase.span_s
    moments = [i for i, at_s in enumerate(series.at_s) if begin <= at_s < end]
    prefill, decode = ([load[i] for i in moments] for load in (series.prefill_load, series.decode_load))
    faults = []

    asked, let_in = Counter[int](), Counter[int]()
    for one in run.outcomes:
        if begin <= one.at_s < end:
            asked[int((one.at_s - begin) / WINDOW_S)] += 1
            let_in[int((one.at_s - begin) / WINDOW_S)] += not one.refused
    shares, mean = [let_in[window] / asked[window] for window in asked], let_in.total() / asked.total()
    if max(abs(share - mean) for share in shares) > POINTS:
        faults.append(f"the share of accepted requests swings: {shares}")
    if not 0.65 < mean < 0.9:
        faults.append(f"this is no load of 1.3: {mean} are accepted")

    accepted = Counter(int(one.at_s + one.held_s) for one in run.outcomes if not one.refused)
    idle = [series.at_s[i] for i, *loads in zip(moments, prefill, decode, strict=True) if max(loads) < IDLE]
    zero = [at_s for at_s in idle if not accepted[int(at_s)]]
    if zero:
        faults.append(f"nobody is let in, with room in both pools, at {zero}")

    if min(swing(prefill), swing(decode)) > SWINGS and correlation(prefill, decode) < -0.5:
        faults.append("the pools swing in opposition")
    return faults


@pytest.mark.parametrize("setup", [PREFILL_BINDS, DECODE_BINDS], ids=["prefill binds", "decode binds"])
def test_the_default_is_steady(setup: Setup) -> None:
    assert faults_of(simulate(setup)) == []


def test_early_rejection_by_the_load_of_now_swings_more() -> None:
    early, ours = (swing_of(simulate(setup)) for setup in (CONTROL, replace(CONTROL, **DEFAULT)))
    assert early > 2 * ours


def swing_of(run: Run) -> float:
    """Of the prefill pool's load in the watched time."""
    (phase,) = run.setup.phases
    loads = zip(run.series.at_s, run.series.prefill_load, strict=True)
    return swing([load for at_s, load in loads if phase.span_s - WATCHED_S <= at_s < phase.span_s])
