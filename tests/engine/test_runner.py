"""The engine's contract: passes by layer or whole, KV as bytes, bad rows refused, one thread."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import Draw, Engine, Row, Sampled, Sampling
from engine.checkpoint import open_checkpoint
from engine.runner import EngineBroken, TorchEngine, load_engine
from tests.engine.referee import BLOCK, GREEDY, a_prompt, an_engine, answer, decode, prefill
from tests.tiny import tiny_model

PROMPT = a_prompt(30)
PAGES = [5, 2, 9, 0, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TorchEngine]:
    engine = an_engine(folder)
    yield engine
    engine.close()


def a_row(tokens: list[int] = PROMPT, start: int = 0, pages: list[int] = PAGES, **sampling: Any) -> Row:
    """A row with one draw, greedy unless told."""
    return Row(tokens, start, pages, [Draw(Sampling(**({"temperature": 0.0} | sampling)), tokens, [])])


async def by_layer(engine: Engine, rows: list[Row]) -> list[list[Sampled]]:
    under_way = engine.begin(rows)
    for layer in range(engine.layout.layers):
        await under_way.layer(layer)
    return await under_way.finish()


async def test_layer_by_layer_is_the_same_as_at_once(engine: TorchEngine):
    rows = [a_row(logprobs=3), a_row(a_prompt(9, seed=1), pages=[20, 21])]
    assert await by_layer(engine, rows) == await engine.step(rows)


async def test_prefill_chunks_and_decode_steps_go_in_one_pass(engine: TorchEngine):
    prompts = [a_prompt(length, seed=length) for length in (33, 17, 40)]
    pages = [list(range(10 * n, 10 * n + 10)) for n in range(3)]
    alone = [await answer(engine, prompt, count=2) for prompt in prompts]
    first = await prefill(engine, prompts[0], pages[0], chunk=100)
    await engine.step([Row(prompts[2][:24], 0, pages[2])])
    mixed = [
        Row([first], 33, pages[0], [Draw(GREEDY, prompts[0], [first])]),  # a decode step
        Row(prompts[1], 0, pages[1], [Draw(GREEDY, prompts[1], [])]),  # a whole prompt
        Row(prompts[2][24:], 24, pages[2], [Draw(GREEDY, prompts[2], [])]),  # the last chunk of a prompt
    ]
    drawn = [row[0].token for row in await engine.step(mixed)]
    assert [first, *drawn] == [*alone[0], alone[1][0], alone[2][0]]


async def test_a_row_draws_as_often_as_it_is_asked(engine: TorchEngine):
    draws = [Draw(Sampling(temperature=2.0, seed=seed), PROMPT, []) for seed in range(8)]
    rows = [Row(PROMPT, 0, PAGES, draws), Row(PROMPT, 0, [11, 12, 13, 14]), a_row(pages=[15, 16, 17, 18])]
    several, none, one = await engine.step(rows)
    assert (len(several), len(none), len(one)) == (8, 0, 1)
    assert len({sampled.token for sampled in several}) > 1
    assert several == (await engine.step(rows))[0]


async def test_a_run_is_its_steps_one_by_one(engine: TorchEngine):
    prompts, pages = [a_prompt(17, seed=1), a_prompt(9, seed=2)], [[60, 61, 62, 63], [70, 71, 72, 73]]
    text = [await answer(engine, prompt, count=9) for prompt in prompts]
    firsts = [await prefill(engine, prompt, held, chunk=100) for prompt, held in zip(prompts, pages, strict=True)]
    sampling = Sampling(temperature=0.0, max_tokens=100)
    rows = [
        Row([first], len(prompt), held, [Draw(sampling, prompt, [first])])
        for prompt, first, held in zip(prompts, firsts, pages, strict=True)
    ]
    said = await engine.run(rows, 8, asyncio.Event())
    assert [[first, *(one.token for one in row)] for first, row in zip(firsts, said, strict=True)] == text
    at = next(n for n in (4, 3, 2, 1) if text[1][n] not in text[1][:n])
    ends = Sampling(temperature=0.0, max_tokens=100, stop_tokens=[text[1][at]])
    ending = [rows[0], rows[1]._replace(draws=[Draw(ends, prompts[1], firsts[1:])])]
    assert [len(row) for row in await engine.run(ending, 8, asyncio.Event())] == [at, at]
    full = [rows[0]._replace(draws=[Draw(replace(sampling, max_tokens=4), prompts[0], firsts[:1])])]
    assert [len(row) for row in await engine.run(full, 8, asyncio.Event())] == [3]
    enough = asyncio.Event()
    enough.set()
    assert await engine.run(rows, 8, enough) == [row[:1] for row in said]


async def test_a_run_that_its_pages_do_not_hold_or_that_is_no_decoding_is_refused(engine: TorchEngine):
    await prefill(engine, PROMPT[:12], [1, 2], chunk=100)
    row = a_row([3], 12, [1, 2], max_tokens=99)  # positions 12 to 15
    assert len((await engine.run([row], 4, asyncio.Event()))[0]) == 4
    with pytest.raises(ValueError, match="2 pages of 8 do not hold 17 tokens"):
        await engine.run([row], 5, asyncio.Event())
    for bad in (a_row([3, 4]), row._replace(draws=())):
        with pytest.raises(ValueError, match="one token and one draw"):
            await engine.run([bad], 1, asyncio.Event())


async def test_no_rows_make_an_empty_pass(engine: TorchEngine):
    assert await engine.step([]) == []
    assert await by_layer(engine, []) == []


async def test_runs_are_the_cache_itself(folder: Path, engine: TorchEngine):
    """KV copied as bytes, layer by layer and into other pages, goes on as the same text in another engine."""
    text = await answer(engine, PROMPT, count=12)
    other = an_engine(folder, pages=32)
    first = await prefill(engine, PROMPT, PAGES, chunk=100)
    elsewhere = [3, 30, 4, 10, 5, 6]
    for layer in range(engine.layout.layers):
        source, target = engine.runs(layer), other.runs(layer)
        assert source.shape == (engine.pages, engine.layout.run_bytes)
        target[elsewhere[: len(PAGES)]] = source[PAGES]
    for page in PAGES:
        block = engine.block(page)
        assert block.shape == (engine.layout.layers, engine.layout.run_bytes)
        assert all(np.shares_memory(run, engine.runs(layer)[page]) for layer, run in enumerate(block))
    assert first == text[0]
    assert (await decode(other, [PROMPT], [first], [elsewhere], count=12))[0] == text
    other.close()


async def test_a_run_is_keys_then_values_by_token(engine: TorchEngine):
    """Computing one token again elsewhere changes its own line of keys and of values in its page, and no other."""
    await engine.step([a_row()])
    layout, at = engine.layout, 11
    shape = (2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    before = [engine.runs(1)[page].view(np.uint32).reshape(shape).copy() for page in PAGES]
    await engine.step([Row([PROMPT[at] + 1], at, PAGES)])
    after = [engine.runs(1)[page].view(np.uint32).reshape(shape) for page in PAGES]
    changed = np.argwhere([(one != other).any((-2, -1)) for one, other in zip(before, after, strict=True)])
    assert changed.tolist() == [[at // BLOCK, kind, at % BLOCK] for kind in (0, 1)]


BAD_ROWS = {
    "needs a token": {"tokens": []},
    "start of at least 0": {"start": -1},
    "a token is outside the vocabulary of 512": {"tokens": [3, 512]},
    "vocabulary": {"tokens": [-1]},
    "a row ends at token 2049; the model's context has 2048": {"start": 2019, "pages": list(range(300))},
    "3 pages of 8 do not hold 30 tokens": {"pages": [1, 2, 3]},
    "a page is outside the engine's 512": {"pages": [1, 2, 3, 512]},
    "outside": {"pages": [1, 2, 3, -1]},
    "a stop or output token is outside": {"stop_tokens": [512]},
}


@pytest.mark.parametrize("reason", BAD_ROWS)
async def test_a_bad_row_is_refused_before_anything_is_touched(engine: TorchEngine, reason: str):
    before = engine.runs(0).copy()
    with pytest.raises(ValueError, match=reason):
        await engine.step([a_row(pages=[40, 41, 42, 43]), a_row(**BAD_ROWS[reason])])
    with pytest.raises(ValueError, match=reason):
        engine.begin([a_row(**BAD_ROWS[reason])])
    assert np.array_equal(before, engine.runs(0))


async def test_layers_out_of_turn_are_refused(engine: TorchEngine):
    under_way = engine.begin([a_row()])
    with pytest.raises(ValueError, match="layer 1 is not next"):
        await under_way.layer(1)
    await under_way.layer(0)
    with pytest.raises(ValueError, match="layer 0 is not next"):
        await under_way.layer(0)
    with pytest.raises(ValueError, match="layer 1 has not been computed"):
        await under_way.finish()


async def test_a_cancelled_caller_leaves_the_engine_usable(engine: TorchEngine):
    text = await answer(engine, PROMPT, count=4)
    for _ in range(5):
        under_way = asyncio.create_task(engine.step([a_row(a_prompt(400), pages=list(range(100, 150)))]))
        await asyncio.sleep(0)
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
    assert await answer(engine, PROMPT, count=4) == text


async def test_logits_that_are_no_numbers_end_the_pass_and_fail_the_self_test(folder: Path):
    engine = an_engine(folder)
    await engine.self_test()
    engine.model.weights.norm.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        await engine.step([a_row()])
    with pytest.raises(EngineBroken):
        await engine.self_test()
    engine.close()


async def test_threads_are_set_where_torch_runs(folder: Path):
    own = torch.get_num_threads()
    engine = load_engine(open_checkpoint(folder), dtype="float32", pages=4, block_tokens=BLOCK, threads=own + 1)
    assert await engine.in_thread(torch.get_num_threads) == own + 1
    engine.close()


@pytest.mark.parametrize(
    ("setting", "reason"), [({"dtype": "int8"}, "dtype must be one of"), ({"pages": 0}, "must be positive")]
)
def test_settings_out_of_range(folder: Path, setting: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        load_engine(
            open_checkpoint(folder),
            **({"dtype": "float32", "pages": 4, "block_tokens": 8, "threads": 1} | setting),
        )


def test_kv_memory_beyond_the_system_names_what_to_lower(folder: Path):
    with pytest.raises(
        ValueError, match=r"1099511627776 KV pages of \d+ bytes, \d+ bytes .* context_tokens or pages"
    ):
        load_engine(open_checkpoint(folder), dtype="float32", pages=1 << 40, block_tokens=8, threads=1)


def test_closing_twice_is_closing_once(folder: Path):
    engine = an_engine(folder)
    engine.close()
    engine.close()
