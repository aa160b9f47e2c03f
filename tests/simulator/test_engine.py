"""The engine that costs time takes as long as its model says; the exact one says what can be foretold."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Draw, Row, Sampling
from protocol.blocks import BlockLayout
from simulator.cost import CostModel, PassCost, StepCost
from simulator.engine import END, FILL, LAST, CostEngine, foreseen, foretell
from simulator.loop import run_virtual

COST = CostModel("test", 2, 64, PassCost(0.5, 0.1, 0.0), StepCost(1.0, 0.25, 0.125), 1e6, 1e6, 1000)
BLOCK = 4
LAYERS = 2
LAYOUT = BlockLayout(LAYERS, 1, 8, BLOCK, "bfloat16")
PAGES = list(range(8, 0, -1))  # in no particular order


def an_engine(*, exact: bool) -> CostEngine:
    return CostEngine(COST, LAYOUT, 16, 64, exact=exact)


def a_draw(output: list[int], length: int = 100, **more: object) -> Draw:
    return Draw(Sampling(seed=length, max_tokens=length, **more), [], output)  # type: ignore[arg-type]


async def prefilled(engine: CostEngine, tokens: list[int], chunk: int) -> int:
    """The first token after `tokens`, computed in chunks of so many."""
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        last = start + chunk >= len(tokens)
        run = engine.begin([Row(part, start, PAGES, [a_draw([])] if last else [])])
        for layer in range(LAYERS):
            await run.layer(layer)
        drawn = await run.finish()
    return drawn[0][0].token


def a_batch(said: int = 1, length: int = 100) -> list[Row]:
    ours, others = list(range(8)), list(range(8, 16))
    return [Row([7], 10, ours, [a_draw([7] * said, length)]), Row([7], 20, others, [a_draw([7], 100)])]


def test_a_pass_and_a_step_take_what_the_cost_model_says() -> None:
    async def main() -> None:
        clock, engine = asyncio.get_running_loop().time, an_engine(exact=False)
        run = engine.begin([Row([1] * 10, 0, PAGES)])
        await run.layer(0)
        assert clock() == pytest.approx(COST.prefill_s(10, 0) / 2)
        await run.layer(1)
        assert clock() == pytest.approx(COST.prefill_s(10, 0))
        began = clock()
        await engine.step(a_batch())
        assert clock() - began == pytest.approx(COST.step_s(2, 32))
        assert engine.computed_s == pytest.approx(clock())

    run_virtual(main())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), st.sampled_from([4, 8, 32]))
def test_whatever_the_chunks_the_text_is_the_one_foretold(tokens: list[int], chunk: int) -> None:
    async def main() -> list[int]:
        engine = an_engine(exact=True)
        said = [await prefilled(engine, tokens, chunk)]
        while len(said) < 3:
            row = Row([said[-1]], len(tokens) + len(said) - 1, PAGES, [a_draw(said)])
            said.append((await engine.step([row]))[0][0].token)
        blocks = foreseen([*tokens, *said[:2]], BLOCK, LAYERS)
        for page, block in zip(PAGES, blocks, strict=False):
            assert [engine.runs(layer)[page].tobytes() for layer in range(LAYERS)] == block
        return said

    assert run_virtual(main()) == foretell(tokens, 3, LAYERS)


def test_one_wrong_byte_of_kv_changes_the_text() -> None:
    async def main() -> None:
        engine = an_engine(exact=True)
        first = await prefilled(engine, [1, 2, 3, 4, 5], 8)
        row = Row([first], 5, PAGES, [a_draw([first])])
        engine.runs(1)[PAGES[1], 0] ^= 1
        assert (await engine.step([row]))[0][0].token != foretell([1, 2, 3, 4, 5], 2, LAYERS)[1]

    run_virtual(main())


@pytest.mark.parametrize("exact", [True, False])
def test_a_run_of_steps_takes_as_long_as_the_steps_and_ends_with_the_first_answer(exact: bool) -> None:
    async def main() -> None:
        clock, engine = asyncio.get_running_loop().time, an_engine(exact=exact)
        said = await engine.run(a_batch(said=1, length=4), 9, asyncio.Event())
        assert [len(each) for each in said] == [3, 3]
        assert clock() == pytest.approx(sum(COST.step_s(2, 32 + 2 * step) for step in range(3)))

    run_virtual(main())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 0.1, 5.5, 5.6, 18.0, 60.0])
def test_enough_ends_a_run_with_the_step_under_way(exact: bool, after_s: float) -> None:
    async def main() -> None:
        clock, engine, enough = asyncio.get_running_loop().time, an_engine(exact=exact), asyncio.Event()
        asyncio.get_running_loop().call_later(after_s, enough.set)
        said = await engine.run(a_batch(), 9, enough)
        ends = [sum(COST.step_s(2, 32 + 2 * step) for step in range(steps)) for steps in range(10)]
        steps = next(n for n, (_, end) in enumerate(pairwise(ends), 1) if after_s <= end or n == 9)
        assert [len(each) for each in said] == [steps, steps]
        assert clock() == pytest.approx(ends[steps])

    run_virtual(main())


def test_an_answer_that_is_only_timed_is_as_long_as_its_seed_says() -> None:
    async def main() -> None:
        engine = an_engine(exact=False)
        draw = Draw(Sampling(seed=3, max_tokens=50, stop_tokens=[END]), [], [2])
        row = Row([2], 10, [1, 2, 3], [draw])
        assert await engine.run([row], 9, asyncio.Event()) == [[FILL, LAST]]
        assert await engine.step([Row([2], 11, [1, 2, 3], [Draw(draw.sampling, [], [2, 2])])]) == [[LAST]]

    run_virtual(main())
