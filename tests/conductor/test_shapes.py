"""The forms of the answers."""

import json

import pytest

from conductor.shapes import (
    LOGPROB_MIN,
    ChatShape,
    CompletionShape,
    Head,
    Spelled,
    Told,
    Usage,
    chunk,
    dumps,
    event,
    finite,
    whole,
)

HEAD = Head("chatcmpl-1", 7, "tiny")
TOLD = Told(Spelled("a", b"a", -0.5), [Spelled("a", b"a", -0.5), Spelled("b", b"b", -1.0)], 3)


def test_a_role_comes_with_the_first_text_only() -> None:
    shape = ChatShape()
    assert shape.delta(0, "a", None, first=True)["delta"] == {"role": "assistant", "content": "a"}
    assert shape.delta(0, "", None)["delta"] == {"content": ""}
    assert shape.delta(0, "", None, reason="stop")["delta"] == {}
    assert shape.delta(0, "x", None, reason="stop")["delta"] == {"content": "x"}


def test_chat_logprobs_are_entries_and_completion_logprobs_columns() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    other = {"token": "b", "logprob": -1.0, "bytes": [98]}
    content = ChatShape().choice(0, "a", [TOLD], "stop")["logprobs"]["content"]
    assert content == [entry | {"top_logprobs": [entry, other]}]
    assert CompletionShape().choice(0, "a", [TOLD], "stop")["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.0}],
        "text_offset": [3],
    }


def test_the_likelier_of_two_tokens_that_are_spelled_alike_stays() -> None:
    alike = Told(Spelled("a", b"a", -0.5), [Spelled("a", b"a", -0.5), Spelled("a", b"a", -9.0)], 0)
    assert CompletionShape().choice(0, "a", [alike], "stop")["logprobs"]["top_logprobs"] == [{"a": -0.5}]


def test_wholes_and_chunks_name_their_kind() -> None:
    usage = Usage(3, 2, 1)
    assert whole(ChatShape(), HEAD, [], usage)["object"] == "chat.completion"
    assert chunk(ChatShape(), HEAD, [])["object"] == "chat.completion.chunk"
    assert "usage" not in chunk(ChatShape(), HEAD, [])
    assert chunk(CompletionShape(), HEAD, [], usage) == {
        "id": "chatcmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_an_event_is_one_line_for_every_reader() -> None:
    text = "a\nb\r\x0b\x0c\x1c\x85\u2028\u2029ö"
    line = event({"text": text}).decode()
    assert line.splitlines() == [line[:-2], ""]
    assert json.loads(line.removeprefix("data: "))["text"] == text


def test_json_is_strict() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps({"a": float("nan")})


@pytest.mark.parametrize(
    ("given", "told"),
    [(-1.5, -1.5), (0.25, 0.0), (float("-inf"), LOGPROB_MIN), (float("nan"), LOGPROB_MIN), (-1e30, LOGPROB_MIN)],
)
def test_logprobs_are_finite_and_not_above_zero(given: float, told: float) -> None:
    assert finite(given) == told
