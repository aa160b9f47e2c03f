"""The model that a newcomer gets, over the whole path, against transformers and against one plain engine."""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.api import Row
from engine.fetch import default_model
from engine.runner import TorchEngine, TorchPass
from tests.engine.referee import an_engine, answer
from tests.service.client import cached, text_of
from tests.service.processes import Service
from tests.service.referee import Referee, text

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(240)]

BLOCK = 16
NEAR_TIE = 1e-3
"""Of log probability: closer than that, other shapes of matrices may decide otherwise."""

TOKENS, SURE_TOKENS = 40, 24

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "A river is a stream of water that flows to the sea. Long rivers have many arms. " * 27,
)
"""The last has more than 512 tokens, so it is computed in chunks."""


@pytest.fixture(scope="module")
def referee() -> Referee:
    return Referee(default_model())


@pytest.fixture(scope="module")
def prompts(referee: Referee) -> list[list[int]]:
    prompts = [referee.tokenizer.encode(prompt, special=False) for prompt in TEXTS]
    assert len(prompts[-1]) > 512
    return prompts


def ask_all(service: Service, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """The answers to all prompts, asked at once."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: service.client.complete(prompt, tokens), prompts))


def test_in_float32_the_text_is_transformers(referee: Referee, prompts: list[list[int]]) -> None:
    with Service(None, "--dtype", "float32", name="smollm2", size="256MiB") as service:
        cold = ask_all(service, prompts, TOKENS)
        service.client.at_rest()
        warm = ask_all(service, prompts, SURE_TOKENS)
        service.client.at_rest()
    assert [text_of(answer) for answer in cold] == [referee.says(prompt, TOKENS) for prompt in prompts]
    assert all(text_of(a).startswith(text_of(b)) for a, b in zip(cold, warm, strict=True))
    assert [cached(answer) for answer in cold] == [0, 0, 0]
    assert [cached(answer) for answer in warm] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]


def test_in_bfloat16_the_text_is_the_engines_own(referee: Referee, prompts: list[list[int]]) -> None:
    """R2, one at a time: in bfloat16 a batch's other shapes decide much wider ties than NEAR_TIE otherwise."""
    engine = an_engine(default_model(), dtype="bfloat16", pages=64, block_tokens=BLOCK)
    with contextlib.closing(engine), Service(None, name="smollm2", size="256MiB") as service:
        for prompt in prompts[1:]:
            own = asyncio.run(answer(engine, prompt, TOKENS, chunk=512))
            sure = text(referee.tokenizer, own[: open_end(engine, prompt, own)])
            cold = service.client.complete(prompt, TOKENS)
            service.client.at_rest()
            warm = service.client.complete(prompt, SURE_TOKENS)
            assert text_of(cold).startswith(sure)
            assert text_of(warm) == text(referee.tokenizer, own[:SURE_TOKENS])


def test_in_int8_the_text_is_as_if_nothing_had_been_packed(referee: Referee, prompts: list[list[int]]) -> None:
    """Cold and warm. Of other texts some would differ (docs/results.md says how many)."""
    flags = ("--dtype", "float32", "--kv-compression", "int8")
    with Service(None, *flags, name="smollm2", size="256MiB") as service:
        for prompt in prompts[::2]:
            cold = service.client.complete(prompt, TOKENS)
            service.client.at_rest()
            warm = service.client.complete(prompt, TOKENS)
            assert cached(warm) == (len(prompt) - 1) // BLOCK * BLOCK
            assert text_of(cold) == text_of(warm) == referee.says(prompt, TOKENS)


def open_end(engine: TorchEngine, prompt: Sequence[int], own: list[int]) -> int:
    """How many tokens come before the first choice that was open."""
    pages = list(range(1, 2 + (len(prompt) + len(own)) // BLOCK))
    row = Row([*prompt, *own], 0, pages)
    logits = TorchPass(engine, [row]).logits_of_all()[len(prompt) - 1 : -1]
    for number, scores in enumerate(logits):
        first, second = sorted(scores)[:-3:-1]
        if number >= SURE_TOKENS and first - second < NEAR_TIE:
            return number
    return len(own)
