"""Passes at the start: what fits, in which order, and what is told of them."""

import itertools

import pytest

from engine.calibrate import BATCHES, PREFILLS, RESTS, calibrate, decode_trials, prefill_trials, rest_trials
from engine.pace import Pace
from engine.paging import pages_for
from tests.fakes import LAYOUT, FakeEngine

LONG_S = 60.0


def a_roomy_engine() -> FakeEngine:
    engine = FakeEngine(pages=1000)
    engine.context_tokens = 4096
    return engine


def test_a_prefill_instance_tries_all_sizes_and_a_whole_chunk() -> None:
    trials = prefill_trials(a_roomy_engine(), chunk_tokens=512)
    assert [(trial.tokens, trial.context) for trial in trials] == [*PREFILLS, (512, 0)]


def test_no_trial_seems_to_go_on_with_the_one_before_it() -> None:
    """The Conductor would take that for a prompt that was cut, and its size for that of a chunk."""
    trials = prefill_trials(a_roomy_engine(), chunk_tokens=512)
    for before, after in itertools.pairwise(trials):
        assert after.context != before.context + before.tokens


def test_a_decode_instance_tries_each_batch_at_each_context() -> None:
    trials = decode_trials(a_roomy_engine(), batch_max=4)
    assert {trial.tokens for trial in trials} == {1, 4}
    assert {trial.context for trial in trials} == {33, 257, 4 * 33, 4 * 257}
    assert all(trial.context == sum(row.start + 1 for row in trial.rows) for trial in trials)


def test_the_first_of_a_size_warms_up_and_is_not_told() -> None:
    told: dict[int, list[bool]] = {}
    for trial in decode_trials(a_roomy_engine(), batch_max=64):
        told.setdefault(trial.tokens, []).append(trial.clean)
    assert told == {batch: [False, True, True] for batch in BATCHES}


@pytest.mark.parametrize("pages", [1, 9, 64, 200])
def test_what_has_no_room_is_left_out(pages: int) -> None:
    engine = FakeEngine(pages=pages)
    trials = [*decode_trials(engine, batch_max=64), *rest_trials(engine, chunk_tokens=64)]
    for trial in [*prefill_trials(engine, chunk_tokens=64), *trials]:
        taken = [page for row in trial.rows for page in row.pages]
        assert len(taken) == len(set(taken)) <= pages
        assert max(taken) < pages
        for row in trial.rows:
            end = row.start + len(row.tokens)
            assert end <= engine.context_tokens
            assert len(row.pages) == pages_for(end, LAYOUT.block_tokens)


async def test_the_first_report_tells_of_the_passes() -> None:
    engine, pace = a_roomy_engine(), Pace()
    trials = prefill_trials(engine, chunk_tokens=64)
    await calibrate(engine, trials, pace, LONG_S)
    assert engine.passes == pace.steps == len(trials)
    told = [(timing.tokens, timing.context) for timing in pace.timings()]
    assert told == [(16, 0), (64, 0), (16, 256), (64, 256), (64, 0)][: len(told)]
    assert len(told) >= 2


async def test_steps_are_told_with_their_batch_and_context() -> None:
    engine, pace = a_roomy_engine(), Pace()
    await calibrate(engine, decode_trials(engine, batch_max=4), pace, LONG_S)
    assert [(timing.tokens, timing.context) for timing in pace.timings()] == [
        *((1, 33), (1, 257)),
        *((4, 4 * 33), (4, 4 * 257)),
    ]


async def test_it_ends_when_its_time_is_over() -> None:
    engine, pace = FakeEngine(pages=1000, layer_s=0.01), Pace()
    engine.context_tokens = 4096
    await calibrate(engine, prefill_trials(engine, chunk_tokens=512), pace, within_s=0.06)
    assert 1 <= pace.steps < len(PREFILLS)


async def test_without_time_nothing_is_run() -> None:
    engine, pace = a_roomy_engine(), Pace()
    await calibrate(engine, prefill_trials(engine, chunk_tokens=512), pace, within_s=0.0)
    assert engine.passes == 0


async def test_memory_that_holds_no_numbers_does_no_harm() -> None:
    engine = a_roomy_engine()
    for layer in range(LAYOUT.layers):
        engine.runs(layer)[:] = 0xFF
    await calibrate(engine, decode_trials(engine, batch_max=1), Pace(), LONG_S)
    assert not (engine.runs(0)[0] == 0xFF).all()


async def test_rests_are_told_with_their_sizes_and_those_of_the_batch() -> None:
    engine, pace = a_roomy_engine(), Pace()
    trials = rest_trials(engine, chunk_tokens=128)
    assert [(trial.rest, trial.prefix) for trial in trials] == [*RESTS, (128, 0)]
    await calibrate(
        engine, [*decode_trials(engine, batch_max=1), *trials, *rest_trials(engine, 128)], pace, LONG_S
    )
    told = [timing for timing in pace.timings() if timing.rest]
    assert {(timing.tokens, timing.context) for timing in told} == {(1, 33)}
    assert [(timing.rest, timing.prefix) for timing in told[:3]] == [(16, 0), (16, 256), (64, 256)]
