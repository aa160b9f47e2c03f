"""The engine alone, in one process, without pools: what the service is compared with."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from bench.setup import Setup
from engine.api import Draw, Engine, Row, Sampling
from engine.hosting import host_engine
from engine.paging import Pages, pages_for


class BareEngine:
    """The service's engine with the service's settings, driven as directly as can be. One call at a time."""

    def __init__(self, engine: Engine, chunk_tokens: int) -> None:
        self.layout = engine.layout
        self._engine = engine
        self._chunk_tokens = chunk_tokens

    async def ttft_s(self, prompt: Sequence[int]) -> float:
        """Time to prefill a prompt in chunks and draw one token."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._prefill(prompt, self._pages([prompt], 1)[0], tokens=1)
        return clock() - began

    async def tpot_s(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Time of a decoding step of all prompts as one batch: the mean from their first tokens to their last."""
        clock = asyncio.get_running_loop().time
        pages = self._pages(prompts, tokens)
        pairs = zip(prompts, pages, strict=True)
        outputs = [[await self._prefill(prompt, own, tokens)] for prompt, own in pairs]
        began = clock()
        for _ in range(tokens - 1):
            rows = [
                _next(prompt, output, own, tokens)
                for prompt, output, own in zip(prompts, outputs, pages, strict=True)
            ]
            for output, drawn in zip(outputs, await self._engine.step(rows), strict=True):
                output.append(drawn[0].token)
        return (clock() - began) / (tokens - 1)

    async def kv_of(self, prompt: Sequence[int]) -> tuple[list[npt.NDArray[np.uint8]], list[int]]:
        """Compute a prompt's KV: each layer's runs, [pages, run_bytes], and the pages that are the prompt's."""
        pages = self._pages([prompt], 1)[0]
        await self._prefill(prompt, pages, tokens=1)
        used = pages_for(len(prompt), self.layout.block_tokens)
        return [self._engine.runs(layer) for layer in range(self.layout.layers)], pages[:used]

    async def _prefill(self, prompt: Sequence[int], pages: Sequence[int], tokens: int) -> int:
        """The first token."""
        draw = Draw(_greedy(tokens), prompt, [])
        drawn = None
        for start in range(0, len(prompt), self._chunk_tokens):
            end = min(start + self._chunk_tokens, len(prompt))
            draws = [draw] if end == len(prompt) else []
            drawn = await self._engine.step([Row(prompt[start:end], start, pages, draws)])
        assert drawn is not None, "a prompt has tokens"
        return drawn[0][0].token

    def _pages(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Pages for prompts and answers. Raises ValueError if there are not so many."""
        free = Pages(self._engine.pages)
        taken = [free.take(pages_for(len(prompt) + tokens, self.layout.block_tokens)) for prompt in prompts]
        given = [pages for pages in taken if pages is not None]
        if len(given) < len(prompts):
            raise ValueError(f"{len(prompts)} streams do not fit in {free.total} pages")
        return given


@asynccontextmanager
async def bare_engine(setup: Setup) -> AsyncIterator[BareEngine]:
    """Load it; close it afterwards. Raises what the service's own instances would end with."""
    config = setup.prefill()
    engine = await host_engine(setup.open(), config)
    try:
        yield BareEngine(engine, config.chunk_tokens)
    finally:
        engine.close()


def _next(prompt: Sequence[int], output: Sequence[int], pages: Sequence[int], tokens: int) -> Row:
    """One sequence's part of a decoding step."""
    start = len(prompt) + len(output) - 1
    return Row([output[-1]], start, pages, [Draw(_greedy(tokens), prompt, output)])


def _greedy(tokens: int) -> Sampling:
    """As the service is asked for it."""
    return Sampling(temperature=0.0, max_tokens=tokens)
