"""The same text whatever happens to be cached, batched, or started: transformers' own, token for token."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.engine.referee import a_prompt
from tests.service.client import cached, text_of
from tests.service.processes import Service
from tests.service.referee import TOKENS, Referee

pytestmark = pytest.mark.cluster

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 10 * BLOCK)

SHAPES = {
    "one of each": ((), "auto"),
    "two of each": (("--prefill", "2", "--decode", "2", "--kvcache", "2"), "auto"),
    "over tcp": ((), "tcp"),
}


@pytest.fixture(scope="module")
def referee(tiny: Path) -> Referee:
    return Referee(tiny)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def shaped(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Service]:
    """The service in one of its shapes."""
    flags, transport = request.param
    with Service(tiny, "--dtype", "float32", *flags, transport=transport) as service:
        yield service


def test_cold_and_warm_say_what_transformers_says(shaped: Service, referee: Referee) -> None:
    for length in (20, 33, 700):  # the last in three chunks
        prompt = a_prompt(length, seed=length)
        cold = shaped.client.complete(prompt, TOKENS)
        shaped.client.at_rest()  # what decode computed of a prompt is stored a little later
        warm = shaped.client.complete(prompt, TOKENS)
        assert text_of(cold) == text_of(warm) == referee.says(prompt)
        assert (cached(cold), cached(warm)) == (0, (length - 1) // BLOCK * BLOCK)
        assert shaped.client.streamed(prompt, TOKENS).text == referee.says(prompt)


def test_the_next_turn_finds_what_decoding_made(
    shaped: Service, referee: Referee, request: pytest.FixtureRequest
) -> None:
    prompt = a_prompt(50, seed=50)
    turn = [*prompt, *referee.tokens(prompt, TOKENS), 9, 8, 7]
    assert text_of(shaped.client.complete(prompt, TOKENS)) == referee.says(prompt)
    shaped.client.at_rest()
    answer = shaped.client.complete(turn, TOKENS)
    made, prefilled = (50 + TOKENS - 1) // BLOCK * BLOCK, 50 // BLOCK * BLOCK
    # With two homes, what decoding made may lie in the other one, and so little is computed sooner than fetched.
    two = request.node.callspec.id == "two of each"
    assert cached(answer) in ({made, prefilled} if two else {made})
    assert text_of(answer) == referee.says(turn)


def test_turns_whose_rest_decode_computes_say_what_transformers_says(shaped: Service, referee: Referee) -> None:
    """While prefill is busy with long prompts, what a turn adds is computed beside the batch."""

    def rests() -> float:
        return shaped.client.metrics()["dango:rests_on_decode_total"]

    before, turn = rests(), a_prompt(40, seed=40)
    with ThreadPoolExecutor(2) as threads:
        for number in range(12):
            long = [a_prompt(1500, seed=2000 + 2 * number + n) for n in range(2)]
            busy = [threads.submit(shaped.client.complete, prompt, 1) for prompt in long]
            answer = shaped.client.complete(turn, TOKENS)
            assert text_of(answer) == referee.says(turn)
            assert cached(answer) % BLOCK == 0
            turn = [*turn, *referee.tokens(turn, TOKENS), 9, 8, 7 + number]
            for one in busy:
                one.result()
            if rests() >= before + 3:
                break
    assert rests() >= before + 3
    shaped.client.at_rest()


def test_sixteen_at_once_say_what_each_says_alone(shaped: Service, referee: Referee) -> None:
    prompts = [a_prompt(10 + 23 * n, seed=n) for n in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda prompt: shaped.client.complete(prompt, TOKENS), prompts))
    assert [text_of(answer) for answer in answers] == [referee.says(prompt) for prompt in prompts]
    shaped.client.at_rest()


@contextmanager
def traffic(service: Service) -> Iterator[None]:
    """Other requests, one after another on two lines, as long as the block lasts."""
    enough = Event()

    def line(number: int) -> None:
        seed = number
        while not enough.is_set():
            service.client.complete(a_prompt(30 + seed % 50, seed=seed), 20, temperature=1.0)
            seed += 2

    with ThreadPoolExecutor(2) as threads:
        lines = [threads.submit(line, number) for number in (1000, 1001)]
        try:
            yield
        finally:
            enough.set()
            for one in lines:
                one.result()


@pytest.mark.parametrize("shaped", [SHAPES["one of each"]], ids=["one of each"], indirect=True)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"]
)
def test_block_borders(shaped: Service, referee: Referee, sampling: dict[str, Any]) -> None:
    """B21: three times each, then longer, then cut: cold, warm, and with other traffic."""
    first = 1 + len(sampling)  # so that the two runs of this test share no prompt

    def say(prompt: list[int]) -> str:
        answer = shaped.client.complete(prompt, 24, **sampling)
        assert cached(answer) % BLOCK == 0
        assert cached(answer) <= len(prompt) - 1
        return text_of(answer)

    golden = {}
    for length in LENGTHS:
        prompt = [first, *a_prompt(length - 1, seed=length)]
        golden[tuple(prompt)] = cold = say(prompt)
        assert [say(prompt), say(prompt)] == [cold, cold]
        longer, shorter = [*prompt, 5, 6, 7], prompt[: length - 2]
        golden[tuple(longer)] = say(longer)
        if shorter:
            golden[tuple(shorter)] = say(shorter)
    if sampling["temperature"] == 0:
        assert golden == {prompt: referee.says(prompt, 24) for prompt in golden}
    with traffic(shaped):
        assert golden == {prompt: say(list(prompt)) for prompt in golden}
    shaped.client.at_rest()
