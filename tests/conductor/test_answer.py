"""Choices as they grow, and how their tokens are timed."""

import pytest
from prometheus_client import CollectorRegistry

from conductor.answer import Answer, Choice, Part, Piece, Silence, Watch
from conductor.metrics import Metrics
from conductor.shapes import Usage
from decode_pool.api import Tokens
from engine.api import EndReason, Sampled, Sampling
from engine.tokenizer import Tokenizer


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def a_choice(tokenizer: Tokenizer, stops: list[str] | None = None, **sampling: int) -> Choice:
    return Choice(0, tokenizer, stops or [], Sampling(**sampling))


def an_answer(tokenizer: Tokenizer, choices: int, metrics: Metrics, clock: Clock) -> Answer:
    made = [Choice(index, tokenizer, [], Sampling()) for index in range(choices)]
    return Answer(made, 10, Silence(), Watch(metrics, clock, arrived=0.0))


def sample(registry: CollectorRegistry, name: str) -> float:
    found = registry.get_sample_value(name, {"model_name": "tiny"})
    assert found is not None
    return found


def test_a_stop_string_ends_a_choice_with_its_token(tokenizer: Tokenizer) -> None:
    choice = a_choice(tokenizer, ["op"])
    pieces = [choice.push(Sampled(token)) for token in tokenizer.encode("stop", special=False)]
    assert "".join(piece.text for piece in pieces) == "st" == choice.text
    assert [piece.reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].reason is EndReason.STOP
    with pytest.raises(AssertionError):
        choice.push(Sampled(40))


def test_no_stop_string_counts_before_the_minimum(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.encode(letter, special=False)[0] for letter in "abab"]
    choice = a_choice(tokenizer, ["ab"], min_tokens=3)
    assert [choice.push(Sampled(token)).text for token in tokens] == ["a", "b", "", ""]
    assert (choice.text, choice.reason) == ("ab", EndReason.STOP)


def test_what_is_held_back_comes_with_the_end(tokenizer: Tokenizer) -> None:
    choice = a_choice(tokenizer, ["ab"])
    assert choice.push(Sampled(tokenizer.encode("a", special=False)[0])) == Piece("", None, True)
    assert choice.end(EndReason.LENGTH) == Piece("a", None, False, EndReason.LENGTH)
    with pytest.raises(AssertionError):
        choice.end(EndReason.LENGTH)


async def test_usage_adds_up_over_prompts_and_choices(tokenizer: Tokenizer) -> None:
    answer = an_answer(tokenizer, 4, Metrics("tiny"), Clock())
    parts = [Part(answer, 0, 4), Part(answer, 2, 6)]
    for part in parts:
        part.prefilled(3)
        assert await part.tokens(1, Tokens([40], [], [0.0]))
        await part.end(1, EndReason.STOP)
    assert answer.usage() == Usage(prompt=10, completion=2, cached=6)
    assert [choice.tokens for choice in answer.choices] == [0, 1, 0, 1]
    with pytest.raises(AssertionError):
        answer.require_complete()


async def test_tokens_that_come_together_are_spread_over_the_time_they_took(tokenizer: Tokenizer) -> None:
    metrics, clock = Metrics("tiny"), Clock()
    answer = an_answer(tokenizer, 1, metrics, clock)
    for now, said in ((2.0, Tokens([40], [], [0.0])), (9.0, Tokens([40, 41, 42], [], [2.0, 2.0, 2.0]))):
        clock.now = now
        assert await answer.tokens(0, said)
    assert sample(metrics.registry, "vllm:inter_token_latency_seconds_count") == 3
    assert sample(metrics.registry, "vllm:inter_token_latency_seconds_sum") == 3.0 + 2.0 + 2.0
    assert (
        metrics.registry.get_sample_value(
            "vllm:inter_token_latency_seconds_bucket", {"model_name": "tiny", "le": "2.5"}
        )
        == 2
    )


async def test_nothing_after_a_stop_string_is_told(tokenizer: Tokenizer) -> None:
    letters = [tokenizer.encode(letter, special=False)[0] for letter in "stopped"]
    metrics = Metrics("tiny")
    choice = a_choice(tokenizer, ["op"])
    answer = Answer([choice], 1, Silence(), Watch(metrics, Clock(), arrived=0.0))
    assert not await answer.tokens(0, Tokens(letters, [], [0.1] * len(letters)))
    assert (choice.text, choice.tokens, choice.reason) == ("st", 4, EndReason.STOP)
    assert sample(metrics.registry, "vllm:generation_tokens_total") == 4


async def test_a_request_has_one_first_token_and_each_choice_its_gaps(tokenizer: Tokenizer) -> None:
    metrics, clock = Metrics("tiny"), Clock()
    answer = an_answer(tokenizer, 2, metrics, clock)
    for now, choice in ((2.0, 0), (3.0, 1), (4.0, 0), (7.0, 1)):
        clock.now = now
        await answer.tokens(choice, Tokens([40], [], [0.0]))
    assert sample(metrics.registry, "vllm:time_to_first_token_seconds_count") == 1
    assert sample(metrics.registry, "vllm:time_to_first_token_seconds_sum") == 2.0
    assert sample(metrics.registry, "vllm:inter_token_latency_seconds_count") == 2
    assert sample(metrics.registry, "vllm:inter_token_latency_seconds_sum") == 2.0 + 4.0
