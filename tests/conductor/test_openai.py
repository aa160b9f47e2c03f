"""Request fields: what they become, what is refused, and by which name."""

import logging
from typing import Any

import pytest

from conductor.openai import UNKNOWN_NAMES_MAX, ChatRequest, CompletionRequest, Reader
from conductor.problem import Problem
from conductor.urgency import Urgency

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return Reader().read(ChatRequest, {"messages": MESSAGES} | fields)


def completion(**fields: Any) -> CompletionRequest:
    return Reader().read(CompletionRequest, {"prompt": "hi"} | fields)


def refusal(read: Any, **fields: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults() -> None:
    (sampling,) = chat().samplings(50, {7, 3}, seed=9)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_tokens) == (50, 0, [3, 7])
    assert (sampling.seed, sampling.logprobs) == (9, None)


def test_null_means_left_out() -> None:
    names = set(ChatRequest.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(names)).samplings(5, [], 1) == chat().samplings(5, [], 1)


@pytest.mark.parametrize(("seed", "seeds"), [(5, [5, 6]), (2**63 - 1, [2**63 - 1, 0]), (-1, [2**63 - 1, 0])])
def test_choices_differ_by_their_seeds(seed: int, seeds: list[int]) -> None:
    assert [sampling.seed for sampling in chat(seed=seed, n=2).samplings(5, [], 0)] == seeds


def test_zero_is_a_value() -> None:
    (sampling,) = chat(seed=0, temperature=0).samplings(5, [], seed=77)
    assert (sampling.seed, sampling.temperature) == (0, 0.0)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 50),
        ({"max_tokens": 4}, 4),
        ({"max_tokens": 51}, 50),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
    ],
)
def test_the_answer_fits_what_was_asked_and_the_context(fields: dict[str, int], length: int) -> None:
    assert chat(**fields).samplings(50, [], 0)[0].max_tokens == length


def test_a_minimum_is_cut_to_the_context_too() -> None:
    assert chat(min_tokens=60).samplings(50, [], 0)[0].min_tokens == 50
    assert refusal(chat, min_tokens=5, max_tokens=4).param == "min_tokens"


@pytest.mark.parametrize(("stop", "stops"), [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_is_one_string_or_some(stop: Any, stops: list[str]) -> None:
    assert chat(stop=stop).stop == stops


def test_ignore_eos_keeps_the_clients_own_stop_tokens() -> None:
    (sampling,) = chat(ignore_eos=True, stop_token_ids=[9, 9]).samplings(5, [1, 2], 0)
    assert sampling.stop_tokens == [9]


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).samplings(5, [], 0)[0].logprobs == logprobs


def test_top_logprobs_alone_is_refused() -> None:
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert chat(top_logprobs=0).top is None


@pytest.mark.parametrize(("given", "logprobs"), [(None, None), (0, 0), (20, 20)])
def test_completion_logprobs(given: int | None, logprobs: int | None) -> None:
    assert completion(logprobs=given).samplings(5, [], 0)[0].logprobs == logprobs


RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 0.5, 2], [-0.1, 2.1, "1", True, []]),
    ("top_p", [1e-9, 1], [0, 1.1]),
    ("top_k", [-1, 0, 50], [-2, 1.5, 2**31]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.01, 1.5, 100], [0, -1, 1e-320, 0.009, 101]),
    ("n", [1, 128], [0, -1, 129]),
    ("seed", [-(2**63), 2**63 - 1], [2**63, "x"]),
    ("max_tokens", [1, 10**9], [0, -1, 2**63]),
    ("min_tokens", [0, 9], [-1]),
    ("stop_token_ids", [[], [1]], [[-1], ["a"], 5, list(range(65))]),
    ("stop", ["x" * 1024], ["", "x" * 1025, [1], [None], 5]),
    ("ignore_eos", [True], [1, "true"]),
    ("cache_salt", ["", "s"], [5, "s" * 257]),
    ("model", ["m"], [5, "m" * 257]),
    ("service_tier", ["auto", "default", "priority", "scale", "flex"], ["Flex", "", "batch", 1]),
    ("priority", [-(2**63), 0, 7], [1.5, "1", True, 2**63]),
    ("ttft_limit_s", [1e-9, 30, 3600], [0, -1, 3600.1, "1", True]),
    ("tbt_limit_s", [0.02, 3600], [0, -1, 3601, []]),
]


@pytest.mark.parametrize(("name", "good", "bad"), RANGES, ids=[name for name, _, _ in RANGES])
def test_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        chat(**{name: value})
    for value in bad:
        param = refusal(chat, **{name: value}).param or ""
        assert param.split("[")[0] == name, value


def test_a_missing_field_is_told_as_missing() -> None:
    with pytest.raises(Problem) as caught:
        Reader().read(ChatRequest, {})
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_unknown_fields_are_told_once_and_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    with caplog.at_level(logging.DEBUG, "conductor.openai"):
        for _ in range(2):
            reader.read(ChatRequest, {"messages": MESSAGES, "user": "u", "banana": 1})
        assert len(caplog.records) == 2
        assert "'u'" not in caplog.text
        for number in range(2 * UNKNOWN_NAMES_MAX):
            reader.read(ChatRequest, {"messages": MESSAGES, f"x{number}": 1})
    assert len(caplog.records) == UNKNOWN_NAMES_MAX


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


def test_what_a_request_says_of_its_urgency() -> None:
    assert chat().urgency() == Urgency()
    fields: dict[str, Any] = {"service_tier": "flex", "priority": -3, "ttft_limit_s": 5, "tbt_limit_s": 0.2}
    assert completion(**fields).urgency() == Urgency("flex", -3, 5.0, 0.2)


def test_usage_options() -> None:
    request = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True, "more": 1})
    assert (request.include_usage(), request.continuous_usage()) == (True, True)
    assert refusal(chat, stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(chat, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
