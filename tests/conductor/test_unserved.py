"""What would change the answer and is not served is refused by name; what asks for nothing passes."""

from typing import Any

import pytest

from conductor.problem import Problem
from conductor.unserved import NEUTRAL, require_served

TOOLS = [{"type": "function", "function": {"name": "f"}}]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": TOOLS}, "tools"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": TOOLS}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"logit_bias": {"5": -100}}, "logit_bias"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]

SERVED: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": [], "tool_choice": "auto"},
    {"tools": None, "tool_choice": None},
    {"response_format": {"type": "text"}},
    {"logit_bias": {}},
    {"echo": False, "best_of": 1, "suffix": None},
    {"add_special_tokens": False},
    {"guided_json": None},
    {"user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True, "store": False},
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
def test_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Problem) as caught:
        require_served(body, False)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported_parameter")


@pytest.mark.parametrize("body", SERVED, ids=str)
def test_served(body: dict[str, Any]) -> None:
    require_served(body, False)


def test_null_and_the_neutral_values_ask_for_nothing() -> None:
    require_served(dict.fromkeys(NEUTRAL), False)
    for name, values in NEUTRAL.items():
        for value in values:
            require_served({name: value}, False)
