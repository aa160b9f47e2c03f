"""How well the Conductor would predict: passes of random sizes of the engine, each predicted, run, and learned.

Before the first, the engine is calibrated as an instance's is.
"""

import asyncio
import random
from collections.abc import Iterator

from bench.report import Row as Measured
from bench.report import Spread
from bench.setup import Setup, random_prompt
from conductor.estimate import Estimates
from engine.api import Draw, Engine, Row, Sampling
from engine.calibrate import Trial, calibrate, decode_trials, prefill_trials, run_trial
from engine.hosting import host_engine
from engine.pace import Pace
from engine.paging import Pages, pages_for
from protocol.ids import Incarnation
from protocol.registry import Pool

ABOUT = "error of predicted pass and step times, by what the service would predict them"

PREFILL_ERROR_MAX, STEP_ERROR_MAX = 15.0, 10.0
"""Per cent, of the median: what decisions on limits can bear."""

PASSES = 12
"""Of each pool in one run."""

STEPS = 10
"""Decode steps of one batch before another takes its place."""

BATCH_MAX, CONTEXT_MAX, PREFIX_MAX = 12, 512, 1024
"""Sequences of a batch, tokens of a sequence, and tokens before a pass, at most."""

KIND = "bench"


async def run(setup: Setup) -> list[Measured]:
    """Measure. Raises what the service's own instances would end with."""
    config, model, dice = setup.prefill(), setup.open(), setup.dice()
    engine = await host_engine(model, config)
    try:
        trials = prefill_trials(engine, config.chunk_tokens)
        passes = _passes(engine, dice, model.tokenizer.vocab, config.chunk_tokens, PASSES * setup.runs)
        prefill = await _errors(engine, Pool.PREFILL, trials, passes, config.calibrate_s)
        trials = decode_trials(engine, BATCH_MAX)
        step = await _errors(
            engine, Pool.DECODE, trials, _steps(engine, dice, PASSES * setup.runs), config.calibrate_s
        )
    finally:
        engine.close()
    return [
        Measured("error of predicted prefill passes", "%", Spread.of(prefill), limit=PREFILL_ERROR_MAX),
        Measured("error of predicted decode steps", "%", Spread.of(step), limit=STEP_ERROR_MAX),
    ]


async def _errors(
    engine: Engine, pool: Pool, first: list[Trial], passes: Iterator[Trial], calibrate_s: float
) -> list[float]:
    """Relative errors in per cent. Each pass is learned after it was predicted."""
    clock = asyncio.get_running_loop().time
    pace, estimates, errors = Pace(), Estimates(), []
    await calibrate(engine, first, pace, calibrate_s)
    for trial in passes:
        estimates.learn(pool, KIND, Incarnation(KIND), pace.timings(), clock())
        if pool is Pool.PREFILL:
            predicted_s = estimates.prefill_s(KIND, trial.tokens, trial.context)
        else:
            predicted_s = estimates.step(KIND).at(trial.tokens, trial.context)
        began = clock()
        await run_trial(engine, trial)
        real_s = clock() - began
        pace.count(trial.tokens, trial.context, real_s)
        errors.append(100 * abs(predicted_s - real_s) / real_s)
    return errors


def _passes(engine: Engine, dice: random.Random, vocab: int, chunk: int, count: int) -> Iterator[Trial]:
    """Prefill passes of up to a chunk, half of them after a prefix."""
    _clear(engine)
    for _ in range(count):
        step = engine.layout.block_tokens
        prefix = dice.choice([0, step * dice.randint(0, PREFIX_MAX // step)])
        said = random_prompt(dice, dice.randint(1, chunk), vocab)
        pages = range(pages_for(prefix + len(said), step))
        yield Trial([Row(said, prefix, pages, [Draw(Sampling(), said, [])])], len(said), prefix, True, True)


def _steps(engine: Engine, dice: random.Random, count: int) -> Iterator[Trial]:
    """Decode steps of batches that change now and then, and grow by a token a step between."""
    _clear(engine)
    for number in range(count):
        if number % STEPS == 0:
            starts = [dice.randint(1, CONTEXT_MAX - STEPS) for _ in range(dice.randint(1, BATCH_MAX))]
            free = Pages(engine.pages)
            owned = [free.take(pages_for(CONTEXT_MAX, engine.layout.block_tokens)) or [] for _ in starts]
        draw = Draw(Sampling(max_tokens=CONTEXT_MAX), [0], [0])
        rows = [
            Row([0], start + number % STEPS, pages, [draw]) for start, pages in zip(starts, owned, strict=True)
        ]
        context = sum(row.start + 1 for row in rows)
        yield Trial(rows, len(rows), context, layerwise=False, clean=True)


def _clear(engine: Engine) -> None:
    """Prefixes are never computed here; zeros stand for them."""
    used = BATCH_MAX * pages_for(CONTEXT_MAX, engine.layout.block_tokens)
    for layer in range(engine.layout.layers):
        engine.runs(layer)[:used] = 0
