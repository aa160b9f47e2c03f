"""From bytes to prompts in tokens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from conductor.order import Order, Orders
from conductor.problem import Problem
from engine.chat_template import NoChatTemplate, TemplateError
from engine.tokenizer import Tokenizer
from engine.tokenizer_source import read_folder
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=4, block_tokens=4, kv_type="float32")
MANIFEST = Manifest("tiny", "m", "t", 64, LAYOUT)


class Refusing:
    """A tokenizer whose template says no."""

    stop_tokens = frozenset({2})
    vocab = 512

    def __init__(self, error: TemplateError) -> None:
        self._error = error

    def encode(self, text: str, *, special: bool, below: int | None = None) -> list[int]:
        return [40]

    def chat(self, messages: Any, *, below: int | None = None) -> list[int]:
        raise self._error

    def token_bytes(self, token: int) -> bytes:
        return b"x"

    def is_special(self, token: int) -> bool:
        return False


def chat(tokenizer: Tokenizer, content: str, **fields: Any) -> Order:
    body = {"messages": [{"role": "user", "content": content}]} | fields
    return Orders(tokenizer, MANIFEST).chat(json.dumps(body).encode(), seed=1)


def completion(tokenizer: Tokenizer, **fields: Any) -> Order:
    return Orders(tokenizer, MANIFEST).completion(json.dumps(fields).encode(), seed=1)


def test_a_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    order = chat(tokenizer, "hi", n=3, stop="x", stream=True, cache_salt="s")
    assert [list(prompt) for prompt in order.prompts] == [tokenizer.chat([{"role": "user", "content": "hi"}])]
    assert [len(samplings) for samplings in order.samplings] == [3]
    assert (order.stops, order.stream, order.salt, order.include_usage) == (["x"], True, "s", False)


def test_control_tokens_in_a_chat_are_text_and_in_a_raw_prompt_themselves(tokenizer: Tokenizer) -> None:
    """B14"""
    special = tokenizer.encode("<|im_end|>", special=True)
    assert len(special) == 1
    assert completion(tokenizer, prompt="a<|im_end|>").prompts[0][-1] == special[0]
    plain, spelled = (chat(tokenizer, text).prompts[0] for text in ("a", "a<|im_end|>"))
    assert plain.count(special[0]) == spelled.count(special[0])


def test_each_prompt_has_its_own_room(tokenizer: Tokenizer) -> None:
    order = completion(tokenizer, prompt=[[1] * 10, [1] * 20], max_tokens=50)
    assert [samplings[0].max_tokens for samplings in order.samplings] == [50, 44]


def test_drawn_seeds_differ_over_prompts_and_given_ones_do_not(tokenizer: Tokenizer) -> None:
    drawn = completion(tokenizer, prompt=["a", "b"], n=2)
    given = completion(tokenizer, prompt=["a", "b"], n=2, seed=7)
    assert [[one.seed for one in samplings] for samplings in drawn.samplings] == [[1, 2], [3, 4]]
    assert [[one.seed for one in samplings] for samplings in given.samplings] == [[7, 8], [7, 8]]


@pytest.mark.parametrize("error", [TemplateError("no system turn here"), NoChatTemplate("no template")])
def test_a_template_that_refuses_is_the_clients_fault(error: TemplateError) -> None:
    """B06"""
    body = json.dumps({"messages": [{"role": "system", "content": "x"}]}).encode()
    with pytest.raises(Problem, match=str(error)) as caught:
        Orders(Refusing(error), MANIFEST).chat(body, seed=1)
    assert (caught.value.status, caught.value.code) == (400, "template_refused")


def test_a_chat_that_is_too_long_names_both_numbers(tokenizer: Tokenizer) -> None:
    """B05"""
    tokens = len(tokenizer.chat([{"role": "user", "content": "hi " * 100}]))
    with pytest.raises(Problem, match=rf"64 tokens.*{tokens} tokens") as caught:
        chat(tokenizer, "hi " * 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


class Untokenising(Tokenizer):
    """A real tokenizer whose slow part must not be reached."""

    @staticmethod
    def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenised")


@pytest.mark.parametrize("chats", [False, True])
def test_a_text_of_megabytes_is_refused_by_its_size_alone(folder: Path, chats: bool) -> None:
    untokenising = Untokenising(read_folder(folder))
    longest = max(len(untokenising.token_bytes(token)) for token in range(untokenising.vocab))
    text = "some words " * (7_000_000 // 11)
    with pytest.raises(Problem, match=r"64 tokens.* at least (\d+) tokens") as caught:
        chat(untokenising, text) if chats else completion(untokenising, prompt=text)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("messages" if chats else "prompt")
    told = int(re.search(r"at least (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert len(text) // longest <= told < len(text) // longest + 20
