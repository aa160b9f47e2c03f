"""A decode instance over a fake engine and pool: the text foretold, alone, in a crowd, short of pages."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from decode_pool.api import Decode, DecodeBusy, Ended, Joined, Tokens, TooLong
from decode_pool.config import DecodeConfig
from decode_pool.service import DecodeService
from decode_pool.writeback import Filled
from engine.api import EndReason, Row, Sampled, Sampling
from kvcache_pool.api import Blocks, Grant, Priority
from protocol.blocks import block_hashes
from protocol.errors import BadMessage
from protocol.ids import RequestId, SegmentId, token_ids
from protocol.message import Message
from protocol.rpc import Ask
from tests.fakes import LAYOUT, MANIFEST, FakeEngine, MemoryMover, foretell

SEGMENT = SegmentId("kvcache-0")
PROMPT = [(5 * i) % 89 for i in range(18)]


class Kept:
    """In place of a WriteBack: keeps what it is offered."""

    def __init__(self) -> None:
        self.blocks: list[Filled] = []
        """One by one, whether or not they were offered together."""
        self.forgotten: list[Grant] = []

    def offer(self, filled: Filled) -> None:
        for block in range(filled.count):
            chain = filled.chain[: len(filled.chain) - filled.count + block + 1]
            self.blocks.append(replace(filled, chain=chain, runs=filled.runs[:, block : block + 1]))

    def forget(self, bad: Grant) -> None:
        self.forgotten.append(bad)


class Bench:
    def __init__(self, engine: FakeEngine, config: DecodeConfig) -> None:
        self.engine, self.mover, self.kept = engine, MemoryMover(), Kept()
        self.service = DecodeService(engine, self.mover, self.kept, MANIFEST, config)  # type: ignore[arg-type]
        self.slots = 0

    async def stored(
        self, prompt: list[int], tokens: int, name: str = "r", output: int = 1, **more: object
    ) -> Decode:
        """A Decode whose KV a prefill instance has stored, `tokens` long in all."""
        said = foretell(prompt, output)
        covered = [*prompt, *said[:-1]]
        blocks = -(-len(covered) // LAYOUT.block_tokens)
        writer, pages = FakeEngine(pages=blocks), list(range(blocks))
        await writer.step([Row(covered, 0, pages)])
        grants = [Grant(SEGMENT, self.slots + page, 1) for page in pages]
        self.slots += blocks
        for layer in range(LAYOUT.layers):
            await self.mover.write(layer, grants, writer.runs(layer), pages, Priority.STORE)
        sampling = Sampling(max_tokens=tokens, **more)  # type: ignore[arg-type]
        names = block_hashes(MANIFEST.root(), covered)
        prompt_ids, said_ids = token_ids(prompt), token_ids(said)
        return Decode(RequestId(name), 0, prompt_ids, said_ids, names, "", "", grants, [], sampling)

    async def begun(self, prompt: list[int], tokens: int, cached: int, name: str = "r", **more: object) -> Decode:
        """A Decode of which only the first `cached` blocks of the prompt are stored: the rest is computed here."""
        whole = await self.stored(prompt, tokens, name)
        assert cached <= len(whole.blocks)
        change = {"output": token_ids(), "blocks": whole.blocks[:cached], "sources": whole.sources[:cached]}
        return Decode(**{**vars(whole), **change, **more})  # type: ignore[arg-type]

    async def decode(self, message: Decode) -> tuple[list[int], Ended]:
        """All tokens of the answer, the given ones included, and how it ended."""
        items: list[Message] = []

        async def send(item: Message, *_: object) -> None:
            items.append(item)

        ended = await self.service.decode(message, Ask([], 10.0, send))
        assert isinstance(ended, Ended)
        assert isinstance(items[0], Joined)
        said = [item for item in items if isinstance(item, Tokens)]
        assert len(said) == len(items) - 1
        tokens = [token for item in said for token in item.tokens]
        return [*message.output, *tokens], ended


@asynccontextmanager
async def a_bench(engine: FakeEngine | None = None, **config: int) -> AsyncIterator[Bench]:
    bench = Bench(engine or FakeEngine(), DecodeConfig(**config))  # type: ignore[arg-type]
    steps = asyncio.create_task(bench.service.step_forever())
    yield bench
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    bench.service.check()
    load = bench.service.load()
    assert load.rows_max > 0
    assert (load.blocks_free, load.running, load.waiting) == (bench.engine.pages, 0, 0)


async def test_the_answer_goes_on_from_loaded_kv():
    async with a_bench() as bench:
        tokens, ended = await bench.decode(await bench.stored(PROMPT, 20))
        assert tokens == foretell(PROMPT, 20)
        assert ended.reason is EndReason.LENGTH
        assert bench.engine.tokens_computed == 19


async def test_a_crowd_says_the_same_as_each_alone():
    async with a_bench(FakeEngine(pages=256)) as bench:
        prompts = [[n, *PROMPT[: n + 1]] for n in range(16)]
        messages = [await bench.stored(p, 8 + n, name=str(n)) for n, p in enumerate(prompts)]
        answers = await asyncio.gather(*(bench.decode(message) for message in messages))
        assert [tokens for tokens, _ in answers] == [foretell(p, 8 + n) for n, p in enumerate(prompts)]


async def test_short_of_pages_the_young_give_way_and_all_finish_right():
    async with a_bench(FakeEngine(pages=14)) as bench:
        prompts = [[n, *PROMPT[:6]] for n in range(6)]
        messages = [await bench.stored(p, 24, name=str(n)) for n, p in enumerate(prompts)]
        answers = await asyncio.gather(*(bench.decode(message) for message in messages))
        assert [tokens for tokens, _ in answers] == [foretell(p, 24) for p in prompts]
        assert bench.service.load().preempted > 0


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("bad", [0, 2, 4])
async def test_a_block_that_cannot_be_loaded_is_recomputed(bad: int, bulk: bool):
    async with a_bench() as bench:
        bench.mover.bulk = bulk
        message = await bench.stored(PROMPT, 12)
        del bench.mover.runs[SEGMENT, bad, 1, 1]
        tokens, _ = await bench.decode(message)
        assert tokens == foretell(PROMPT, 12)
        assert bench.kept.forgotten == ([message.sources[bad]] if bad < len(message.blocks) else [])


@pytest.mark.parametrize("bulk", [True, False])
async def test_blocks_are_loaded_whole_or_layer_by_layer_as_the_mover_says(bulk: bool):
    class Counted(MemoryMover):
        whole, layers = 0, 0

        async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
            self.whole += 1
            assert priority is Priority.LOAD
            return await super().read_blocks(grants, blocks, priority)

        async def read(self, *how: Any) -> int:
            self.layers += 1
            return await super().read(*how)

    async with a_bench() as bench:
        bench.service._mover = bench.mover = Counted(bulk=bulk)
        message = await bench.stored(PROMPT, 12)
        assert (await bench.decode(message))[0] == foretell(PROMPT, 12)
        assert (bench.mover.whole, bench.mover.layers) == (int(bulk), LAYOUT.layers)


async def test_an_answer_taken_over_midway_goes_on_the_same():
    async with a_bench() as bench:
        tokens, _ = await bench.decode(await bench.stored(PROMPT, 20, output=9))
        assert tokens == foretell(PROMPT, 20)


async def test_full_blocks_are_offered_back_under_their_names_with_their_bytes():
    async with a_bench() as bench:
        tokens, _ = await bench.decode(await bench.stored(PROMPT, 12))
        # All tokens but the last have KV: 18 + 11 = 29, seven full blocks, of which the prompt had four.
        names = block_hashes(MANIFEST.root(), [*PROMPT, *tokens[:-1]])
        assert [block.chain for block in bench.kept.blocks] == [names[:n] for n in (5, 6, 7)]
        writer = FakeEngine(pages=8)
        await writer.step([Row([*PROMPT, *tokens[:-1]], 0, list(range(8)))])
        for page, block in enumerate(bench.kept.blocks, 4):
            assert all((block.runs[layer, 0] == writer.runs(layer)[page]).all() for layer in range(3))


async def test_a_stop_token_ends_the_answer_and_is_reported():
    said = foretell(PROMPT, 12)
    stop = next(token for n, token in enumerate(said) if n >= 3 and token not in said[:n])
    async with a_bench() as bench:
        tokens, ended = await bench.decode(await bench.stored(PROMPT, 12, stop_tokens=[stop]))
        assert ended.reason is EndReason.STOP
        assert tokens == said[: said.index(stop) + 1]


async def test_an_answer_may_fill_the_context_and_not_go_beyond():
    prompt = [n % 50 for n in range(MANIFEST.context_tokens - 3)]
    async with a_bench() as bench:
        tokens, ended = await bench.decode(await bench.stored(prompt, 3))
        assert ended.reason is EndReason.LENGTH
        assert tokens == foretell(prompt, 3)
        with pytest.raises(TooLong, match="257"):
            await bench.decode(await bench.stored(prompt, 4))


async def test_cancelling_leaves_the_batch_before_the_next_step_and_the_others_alone():
    async with a_bench(FakeEngine(layer_s=0.003)) as bench:
        other = asyncio.create_task(bench.decode(await bench.stored(PROMPT, 20, name="other")))
        task = asyncio.create_task(bench.decode(await bench.stored([9, *PROMPT], 200, name="gone")))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bench.service.load().running == 1
        assert (await other)[0] == foretell(PROMPT, 20)


async def test_what_can_never_fit_and_what_is_one_too_many_is_refused():
    async with a_bench(FakeEngine(pages=6), queue_max=1) as bench:
        with pytest.raises(TooLong, match="6 pages"):
            await bench.decode(await bench.stored(PROMPT, 100))
        task = asyncio.create_task(bench.decode(await bench.stored(PROMPT, 4)))
        await asyncio.sleep(0)
        with pytest.raises(DecodeBusy):
            await bench.decode(await bench.stored(PROMPT, 4, name="other"))
        await task


async def test_messages_that_do_not_fit_together_are_refused():
    async with a_bench() as bench:
        good = await bench.stored(PROMPT, 4)
        more, none = [*good.sources, good.sources[0]], token_ids()
        for change in (
            {"prompt": none, "output": none, "sources": [], "blocks": []},
            {"sources": more},
            {"sources": good.sources[2:]},
            {"blocks": good.blocks[1:]},
            {"chunk_tokens": -1},
        ):
            with pytest.raises(BadMessage):
                await bench.decode(Decode(**{**vars(good), **change}))


# -- the rest of a prompt ---------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [0, 1, 3, 4])
@pytest.mark.parametrize("steps_max", [1, 8])
async def test_the_rest_of_a_prompt_is_computed_here_and_the_first_token_drawn(cached: int, steps_max: int):
    async with a_bench(steps_max=steps_max) as bench:
        tokens, ended = await bench.decode(await bench.begun(PROMPT, 12, cached))
        assert (tokens, ended.reason) == (foretell(PROMPT, 12), EndReason.LENGTH)
        assert bench.engine.tokens_computed == len(PROMPT) - 4 * cached + 11


@pytest.mark.parametrize(("chunk", "own", "passes"), [(0, 256, 1), (0, 5, 3), (4, 256, 4), (256, 5, 3)])
async def test_a_rest_is_computed_in_chunks_of_what_was_asked_for_and_no_more_than_is_set(
    chunk: int, own: int, passes: int
):
    async with a_bench(chunk_tokens=own) as bench:
        message = await bench.begun(PROMPT, 1, 1, chunk_tokens=chunk)
        assert (await bench.decode(message))[0] == foretell(PROMPT, 1)
        assert bench.engine.passes == passes


async def test_rests_beside_a_running_batch_change_no_word_of_it():
    async with a_bench(FakeEngine(pages=256), chunk_tokens=4, steps_max=3) as bench:
        prompts = [[n, *PROMPT] for n in range(8)]
        messages = [
            await (bench.begun(p, 10, n % 5, name=str(n)) if n % 2 else bench.stored(p, 10, name=str(n)))
            for n, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(bench.decode(message) for message in messages))
        assert [tokens for tokens, _ in answers] == [foretell(p, 10) for p in prompts]


async def test_a_rest_that_is_preempted_begins_again_and_says_the_same():
    async with a_bench(FakeEngine(pages=14), chunk_tokens=2) as bench:
        prompts = [[n, *PROMPT[:6]] for n in range(6)]
        messages = [await bench.begun(p, 24, 1, name=str(n)) for n, p in enumerate(prompts)]
        answers = await asyncio.gather(*(bench.decode(message) for message in messages))
        assert [tokens for tokens, _ in answers] == [foretell(p, 24) for p in prompts]
        assert bench.service.load().preempted > 0


@pytest.mark.parametrize("write_back", [False, True])
async def test_blocks_of_a_prompt_that_are_computed_here_are_always_stored_those_of_answers_if_wanted(
    write_back: bool,
):
    near = SegmentId("kvcache-7")
    async with a_bench(write_back=write_back) as bench:
        tokens, _ = await bench.decode(await bench.begun(PROMPT, 12, 1, near=near))
        names = block_hashes(MANIFEST.root(), [*PROMPT, *tokens[:-1]])
        kept = bench.kept.blocks
        assert [block.chain for block in kept] == [names[:n] for n in range(2, 8 if write_back else 5)]
        assert {block.near for block in kept} == {near}
        writer = FakeEngine(pages=8)
        await writer.step([Row([*PROMPT, *tokens[:-1]], 0, list(range(8)))])
        for page, block in enumerate(kept, 1):
            assert all((block.runs[layer, 0] == writer.runs(layer)[page]).all() for layer in range(3))


async def test_the_first_token_waits_for_no_other():
    """Neither for those that are gathered with it, nor for the end of a run, where the rest is one token."""
    for cached in (1, 4):
        async with a_bench(stream_interval=5, steps_max=8) as bench:
            items: list[Tokens] = []

            async def send(item: Message, *_: object, items: list[Tokens] = items) -> None:
                if isinstance(item, Tokens):
                    items.append(item)

            prompt = PROMPT[:17]
            await bench.service.decode(await bench.begun(prompt, 12, cached), Ask([], 10.0, send))
            assert len(items[0].tokens) == 1
            assert [token for item in items for token in item.tokens] == foretell(prompt, 12)


async def test_joined_says_what_came_from_the_pool():
    async with a_bench() as bench:
        for bad, loaded in ((None, 12), (1, 4)):
            items: list[Joined] = []

            async def send(item: Message, *_: object, items: list[Joined] = items) -> None:
                if isinstance(item, Joined):
                    items.append(item)

            message = await bench.begun(PROMPT, 2, 3)
            if bad is not None:
                del bench.mover.runs[SEGMENT, message.sources[bad].slot, 1, 2]
            await bench.service.decode(message, Ask([], 10.0, send))
            assert [item.loaded_tokens for item in items] == [loaded]


async def test_a_step_with_one_rest_is_told_with_its_sizes_and_one_with_two_is_not():
    async with a_bench(FakeEngine(pages=256, layer_s=0.002), chunk_tokens=4) as bench:
        other = asyncio.create_task(bench.decode(await bench.stored(PROMPT, 60, name="other")))
        await asyncio.sleep(0.03)
        await bench.decode(await bench.begun(PROMPT, 1, 2, name="one"))
        rests = [(t.tokens, t.rest, t.prefix) for t in bench.service.load().timings if t.rest]
        assert rests == [(1, 4, 8), (1, 4, 12), (1, 2, 16)]
        two = [bench.decode(await bench.begun([n, *PROMPT], 1, 2, name=f"two {n}")) for n in range(2)]
        await asyncio.gather(*two)
        assert not any(timing.rest for timing in bench.service.load().timings)
        await other


class Counted(FakeEngine):
    """Keeps how many steps each run was allowed and how many it took."""

    def __init__(self, **more: int) -> None:
        super().__init__(**more)
        self.ran: list[tuple[int, int]] = []

    async def run(self, rows: Sequence[Row], steps: int, enough: asyncio.Event) -> list[list[Sampled]]:
        said = await super().run(rows, steps, enough)
        self.ran.append((steps, len(said[0])))
        return said


async def test_runs_end_with_blocks_and_at_the_last_token_and_write_back_the_same():
    engine = Counted()
    async with a_bench(engine, steps_max=8) as bench:
        tokens, ended = await bench.decode(await bench.stored(PROMPT, 12))
        assert (tokens, ended.reason) == (foretell(PROMPT, 12), EndReason.LENGTH)
        # From token 18 on: to the ends of the blocks at 20, 24 and 28, and one more.
        assert engine.ran == [(2, 2), (4, 4), (4, 4), (1, 1)]
        names = block_hashes(MANIFEST.root(), [*PROMPT, *tokens[:-1]])
        assert [block.chain for block in bench.kept.blocks] == [names[:n] for n in (5, 6, 7)]


async def test_a_crowd_in_runs_says_the_same_and_short_of_pages_too():
    async with a_bench(FakeEngine(pages=24), steps_max=5) as bench:
        prompts = [[n, *PROMPT[: n + 1]] for n in range(12)]
        messages = [await bench.stored(p, 8 + n, name=str(n)) for n, p in enumerate(prompts)]
        answers = await asyncio.gather(*(bench.decode(message) for message in messages))
        assert [tokens for tokens, _ in answers] == [foretell(p, 8 + n) for n, p in enumerate(prompts)]


async def test_a_stop_token_ends_a_run_and_nothing_is_said_after_it():
    said = foretell(PROMPT, 12)
    stop = next(token for n, token in enumerate(said) if n >= 3 and token not in said[:n])
    async with a_bench(steps_max=8) as bench:
        tokens, ended = await bench.decode(await bench.stored(PROMPT, 12, stop_tokens=[stop]))
        assert (tokens, ended.reason) == (said[: said.index(stop) + 1], EndReason.STOP)


async def test_who_joins_or_leaves_waits_for_one_step_of_a_run():
    """The engine stands still in a step of a long run while one comes, or goes: the run ends with that step."""

    class Gated(Counted):
        def __init__(self) -> None:
            super().__init__(pages=128)
            self.entered, self.gate = asyncio.Event(), asyncio.Event()

        async def step(self, rows: Sequence[Row]) -> list[list[Sampled]]:
            self.entered.set()
            await self.gate.wait()
            return await super().step(rows)

    for leaves in (False, True):
        engine = Gated()
        async with a_bench(engine, steps_max=4) as bench:
            prompt = PROMPT[:17]  # the first run could take the four steps to the end of the block
            first = asyncio.create_task(bench.decode(await bench.stored(prompt[:16], 20, name="a", output=2)))
            await engine.entered.wait()
            if leaves:
                first.cancel()
                other = None
            else:
                other = asyncio.create_task(bench.decode(await bench.stored(PROMPT, 4, name="b")))
            for _ in range(50):
                await asyncio.sleep(0)
            engine.gate.set()
            await asyncio.gather(first, *([other] if other else []), return_exceptions=True)
            assert engine.ran[0] == (3, 1)


async def test_tokens_carry_their_details_only_when_asked_for_and_the_time_they_took():
    for logprobs in (None, 0):
        async with a_bench(FakeEngine(layer_s=0.001), steps_max=8) as bench:
            items: list[Tokens] = []

            async def send(item: Message, *_: object, items: list[Tokens] = items) -> None:
                if isinstance(item, Tokens):
                    items.append(item)

            await bench.service.decode(await bench.stored(PROMPT, 7, logprobs=logprobs), Ask([], 10.0, send))
            assert [len(item.tokens) for item in items] == [2, 4]
            assert [len(item.details) for item in items] == ([0, 0] if logprobs is None else [2, 4])
            assert all(len(item.took_s) == len(item.tokens) for item in items)
            assert all(seconds >= LAYOUT.layers * 0.001 for item in items for seconds in item.took_s)


async def test_nothing_is_written_back_when_that_is_off():
    async with a_bench(write_back=False) as bench:
        assert (await bench.decode(await bench.stored(PROMPT, 12)))[0] == foretell(PROMPT, 12)
        assert bench.kept.blocks == []


async def test_a_step_that_fails_ends_its_requests_and_not_the_loop():
    class Broken(FakeEngine):
        broken = True

        def compute(self, layer: int, row: Row) -> None:
            if self.broken:
                raise RuntimeError("out of order")
            super().compute(layer, row)

    engine = Broken()
    async with a_bench(engine) as bench:
        with pytest.raises(RuntimeError, match="out of order"):
            await bench.decode(await bench.stored(PROMPT, 4))
        engine.broken = False
        assert (await bench.decode(await bench.stored(PROMPT, 4)))[0] == foretell(PROMPT, 4)
