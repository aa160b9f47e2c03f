"""What is sent is the trace scaled down, as fast as asked; what came of it is recorded, request by request."""

from pathlib import Path
from typing import Any

import pytest

from bench.client import session
from bench.prediction import STEP, TTFT
from bench.setup import Setup
from bench.truth import PARTS, capacity, drive, prompt_of, rows, scaled_down, settings_of, work_s, workload
from simulator.cost import CostModel, PassCost, StepCost
from simulator.experiments.truth import figure
from simulator.setup import Setup as SimulatedSetup
from simulator.workload import Arrival
from tests.bench.endpoint import an_endpoint
from tests.tiny import tiny_model

COST = CostModel(
    name="small",
    layers=4,
    kv_bytes_token=1024,
    prefill=PassCost(0.01, 0.001, 0.0),
    step=StepCost(0.02, 0.01, 0.0),
    host_bytes_s=1e9,
    network_bytes_s=1e9,
    pages_tokens=16_384,
    speeds=(1.0, 0.8),
)


def test_blocks_stay_blocks_and_answers_get_shorter() -> None:
    arrival = scaled_down(Arrival(1.0, 1025, 80, [7, 8, 9]), 16)
    assert (arrival.tokens, arrival.output, arrival.blocks) == (33, 10, [7, 8, 9])
    assert scaled_down(Arrival(0.0, 1, 1, [7]), 16).output == 1
    for one in (scaled_down(one, 16) for one in SimulatedSetup(limit=300).arrivals()):
        assert -(-one.tokens // 16) == len(one.blocks)


def test_work_counts_what_is_cached_once_and_steps_by_their_rows() -> None:
    one = Arrival(0.0, 33, 5, [7, 8, 9])
    cold = 0.01 + 33 * 0.001 + 4 * 0.02
    warm = 0.01 + 1 * 0.001 + 4 * 0.02
    assert work_s([one], COST, 16) == pytest.approx(cold)
    assert work_s([one, one], COST, 16) == pytest.approx(cold + warm)
    assert capacity(COST) == pytest.approx(1.6)


@pytest.mark.parametrize("wanted", PARTS, ids=lambda wanted: wanted.name)
def test_a_part_is_as_long_and_as_heavy_as_asked(wanted: Any) -> None:
    arrivals = workload(COST, 16, wanted, 300.0)
    span_s = arrivals[-1].at_s * len(arrivals) / (len(arrivals) - 1)
    assert span_s == pytest.approx(300.0, rel=0.05)
    assert work_s(arrivals, COST, 16) / capacity(COST) / span_s == pytest.approx(wanted.load, rel=0.15)
    assert arrivals == workload(COST, 16, wanted, 300.0)


def test_equal_blocks_are_equal_tokens() -> None:
    one, other = Arrival(0.0, 33, 1, [7, 8, 9]), Arrival(0.0, 40, 1, [7, 5, 9])
    left, right = prompt_of(one, 16, 100, 3), prompt_of(other, 16, 100, 3)
    assert (len(left), len(right)) == (33, 40)
    assert left[:16] == right[:16]
    assert left[16:32] != right[16:32]
    assert left[32:] == right[32:33]
    assert left != prompt_of(one, 16, 100, 4)


async def test_every_request_is_recorded_with_what_became_of_it() -> None:
    arrivals = [Arrival(0.01 * n, 3, 4, [n]) for n in range(3)]
    async with an_endpoint(1) as endpoint, session() as http:
        sent = await drive(http, endpoint.url, arrivals, [[1, 2, 3]] * 3, PARTS[1])
    assert [one.refused for one in sent] == ["", "HTTP 429: full", ""]
    assert sent[0].ttft_s is not None
    assert sent[0].tpot_s is not None
    assert (sent[1].ttft_s, sent[1].tpot_s) == (None, None)
    assert [one.blocks for one in sent] == [[0], [1], [2]]
    assert {body["ttft_limit_s"] for body in endpoint.bodies} == {PARTS[1].ttft_limit_s}


def test_the_settings_of_the_service_are_those_of_a_simulation(tmp_path: Path) -> None:
    settings = settings_of(Setup(model=str(tiny_model(tmp_path))))
    made = SimulatedSetup(**settings)
    assert (made.prefill, made.decode, made.block_tokens, made.chunk_tokens, made.steps_max) == (2, 2, 16, 512, 1)
    assert made.report_s == 0.5


def test_rows_tell_how_far_the_simulation_is_off() -> None:
    figures = [figure("median TTFT", 1.0, 0.9, 0.2), figure("refused", 0, 0, 0.1), figure("p90 TTFT", 2.0, 2.0)]
    calm = {"figures": figures[:1] + figures[2:], "errors": {TTFT: 16.0, STEP: 3.0}}
    made = {row.name: row for row in rows({"parts": {"calm": calm}})}
    assert made["calm: median TTFT, simulated"].ratio == pytest.approx(0.9)
    assert made["  off by"].measured.median == pytest.approx(10.0)
    assert made["  off by"].within
    assert not made[f"calm: median error, {TTFT}"].within
    assert made[f"calm: median error, {STEP}"].within
    shown, off = rows({"parts": {"calm": {"figures": figures[1:2], "errors": {}}}})
    assert (shown.against, off.measured.median, off.within) == (None, 0.0, True)
