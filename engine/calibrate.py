"""A few passes at the start of an instance, so that its first report already says how long passes take.

They run in the engine's pages before these are anyone's, over KV that is all zeros: what is computed is of no use,
only its time is. Small passes come first, for the time may not suffice for all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import Draw, Engine, Row, Sampling
from engine.pace import Pace
from engine.paging import pages_for

PREFILLS = ((16, 0), (16, 0), (64, 0), (64, 0), (16, 256), (64, 256), (256, 256), (256, 0))
"""Tokens and prefix of each pass: few and many tokens, without and with a prefix, in a second on two CPU cores.
No pass begins where the one before it ended, as parts of one prompt would."""

RESTS = ((16, 0), *((16, 0), (16, 256), (64, 0), (64, 256)) * 2)
"""The same of the prompts that decode steps compute beside one sequence."""

BATCHES, CONTEXTS = (1, 4, 8), (32, 256)
"""Sequences of the decode steps, and tokens of context of each of them."""

TOKENS = (0, 1)
"""What is computed, in turns: tokens that any vocabulary has."""


@dataclass(frozen=True)
class Trial:
    """One pass, and how Pace counts it."""

    rows: Sequence[Row]
    tokens: int
    context: int
    layerwise: bool
    """Driven layer by layer, as the passes of a prefill instance are."""
    clean: bool
    """False for one that warms up what the next of its size needs."""
    rest: int = 0
    """Tokens of a prompt that a decode step computes beside its batch."""
    prefix: int = 0
    """Tokens of that prompt before them."""


def prefill_trials(engine: Engine, chunk_tokens: int) -> list[Trial]:
    """Passes of a prefill instance that fit in the engine's pages and in a chunk; a whole chunk comes last."""
    return [
        Trial([row], len(row.tokens), row.start, layerwise=True, clean=clean)
        for row, clean in _parts(engine, PREFILLS, chunk_tokens)
    ]


def decode_trials(engine: Engine, batch_max: int) -> list[Trial]:
    """Steps of a decode instance that fit in the engine's pages: each batch, warmed up once, at each context."""
    trials = []
    for batch in (batch for batch in BATCHES if batch <= batch_max):
        clean = False
        for context in CONTEXTS:
            each = pages_for(context + 1, engine.layout.block_tokens)
            if context + 1 > engine.context_tokens or batch * each > engine.pages:
                continue
            draw = Draw(Sampling(max_tokens=2), _said(context), [TOKENS[0]])
            owned = [range(each * index, each * (index + 1)) for index in range(batch)]
            rows = [Row([TOKENS[0]], context, pages, [draw]) for pages in owned]
            for _ in range(1 if clean else 2):
                trials.append(Trial(rows, batch, batch * (context + 1), layerwise=False, clean=clean))
                clean = True
    return trials


def rest_trials(engine: Engine, chunk_tokens: int) -> list[Trial]:
    """Steps of a decode instance that compute part of a prompt beside one sequence; a whole chunk comes last."""
    context = CONTEXTS[0]
    own = pages_for(context + 1, engine.layout.block_tokens)
    draw = Draw(Sampling(max_tokens=2), _said(context), [TOKENS[0]])
    plain = Row([TOKENS[0]], context, range(own), [draw])
    return [
        Trial([plain, row], 1, context + 1, layerwise=False, clean=clean, rest=len(row.tokens), prefix=row.start)
        for row, clean in _parts(engine, RESTS, chunk_tokens, own)
    ]


async def calibrate(engine: Engine, trials: Sequence[Trial], pace: Pace, within_s: float) -> None:
    """Run trials, counted by `pace`, until the next would probably end later than `within_s`; none for 0."""
    if within_s == 0:
        return
    clock = asyncio.get_running_loop().time
    began, token_s = clock(), 0.0
    _clear(engine, trials)
    for trial in trials:
        start = clock()
        computed = trial.tokens + trial.rest
        if start + token_s * computed > began + within_s:
            break
        await run_trial(engine, trial)
        seconds = clock() - start
        pace.count(trial.tokens, trial.context, seconds, clean=trial.clean, rest=trial.rest, prefix=trial.prefix)
        token_s = seconds / computed  # the next is no slower in each token: sizes grow


async def run_trial(engine: Engine, trial: Trial) -> None:
    """One pass, driven as an instance would drive it. Raises what the engine raises."""
    if not trial.layerwise:
        await engine.step(trial.rows)
        return
    run = engine.begin(trial.rows)
    for layer in range(engine.layout.layers):
        await run.layer(layer)
    await run.finish()


def _clear(engine: Engine, trials: Sequence[Trial]) -> None:
    """Zeros are numbers; what memory holds before its first use may be none."""
    used = max((page + 1 for trial in trials for row in trial.rows for page in row.pages), default=0)
    for layer in range(engine.layout.layers):
        engine.runs(layer)[:used] = 0


def _said(tokens: int) -> list[int]:
    return [TOKENS[index % len(TOKENS)] for index in range(tokens)]


def _parts(
    engine: Engine, sizes: Sequence[tuple[int, int]], chunk_tokens: int, taken: int = 0
) -> list[tuple[Row, bool]]:
    """Rows of these sizes and of a whole chunk, as far as they fit beside `taken` pages; whether each is clean."""
    parts, met = [], set()
    for tokens, prefix in (*sizes, (chunk_tokens, 0)):
        pages = taken + pages_for(prefix + tokens, engine.layout.block_tokens)
        if tokens <= chunk_tokens and prefix + tokens <= engine.context_tokens and pages <= engine.pages:
            said = _said(tokens)
            small = tokens < 256  # the time to warm up is little beside that of a larger pass
            row = Row(said, prefix, range(taken, pages), [Draw(Sampling(), said, [])])
            parts.append((row, not small or tokens in met))
            met.add(tokens)
    return parts
