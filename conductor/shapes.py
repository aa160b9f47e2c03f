"""Responses as OpenAI's clients expect them: plain dicts, in the forms of the two endpoints."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Legal in JSON, but readers that split lines the Unicode way would cut an event in two."""


@dataclass(frozen=True)
class Spelled:
    """A token as logprobs show it."""

    name: str
    data: bytes
    """What it adds to the text; empty for a token that is not shown."""
    logprob: float


@dataclass(frozen=True)
class Told:
    """One token of an answer with its logprob and the alternatives'."""

    chosen: Spelled
    top: Sequence[Spelled]
    offset: int
    """Characters of the answer before it."""


@dataclass(frozen=True)
class Usage:
    """The tokens that a request took."""

    prompt: int
    completion: int
    cached: int

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Head:
    """What every object of one response repeats."""

    id: str
    created: int
    model: str
    service_tier: str | None = None
    """The tier that served it, if the request named one."""


class Shape(Protocol):
    """How one endpoint spells an answer, whole or in chunks."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def choice(self, index: int, text: str, told: Sequence[Told] | None, reason: str) -> dict[str, Any]:
        """One choice of a whole answer."""
        ...

    def delta(
        self, index: int, text: str, told: Told | None, *, first: bool = False, reason: str | None = None
    ) -> dict[str, Any]:
        """One choice of a chunk."""
        ...


class ChatShape:
    """The objects of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, index: int, text: str, told: Sequence[Told] | None, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _content(told), "finish_reason": reason}

    def delta(
        self, index: int, text: str, told: Told | None, *, first: bool = False, reason: str | None = None
    ) -> dict[str, Any]:
        """The role comes in the chunk of the first token: earlier, it would pass for a first token."""
        delta = {"content": text} if text or reason is None else {}
        if first:
            delta = {"role": "assistant", "content": text}
        logprobs = _content(None if told is None else [told])
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionShape:
    """The objects of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def choice(self, index: int, text: str, told: Sequence[Told] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": _columns(told), "finish_reason": reason}

    def delta(
        self, index: int, text: str, told: Told | None, *, first: bool = False, reason: str | None = None
    ) -> dict[str, Any]:
        """`first` changes nothing here: a completion has no role."""
        return self.choice(index, text, None if told is None else [told], reason)


def whole(shape: Shape, head: Head, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """A complete answer."""
    return _object(shape.whole_object, head, choices) | {"usage": usage.body()}


def chunk(shape: Shape, head: Head, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
    """One event of a stream; the one that reports the usage at the end has no choices."""
    made = _object(shape.chunk_object, head, choices)
    return made if usage is None else made | {"usage": usage.body()}


def model(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """A served model, with vLLM's `max_model_len`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "dango",
        "root": name,
        "parent": None,
        "max_model_len": context_tokens,
    }


def models(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """The list of served models."""
    return {"object": "list", "data": cards}


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {dumps(body)}\n\n".encode()


def dumps(body: dict[str, Any]) -> str:
    """Strict JSON without needless bytes, on one line whoever splits it."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(LINE_BREAKS)


def finite(logprob: float) -> float:
    """A log probability that JSON can write: within LOGPROB_MIN and 0."""
    return LOGPROB_MIN if math.isnan(logprob) else min(0.0, max(LOGPROB_MIN, logprob))


def _object(kind: str, head: Head, choices: list[dict[str, Any]]) -> dict[str, Any]:
    made = {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}
    return made if head.service_tier is None else made | {"service_tier": head.service_tier}


def _content(told: Sequence[Told] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    entries = [_entry(token.chosen) | {"top_logprobs": [_entry(other) for other in token.top]} for token in told]
    return {"content": entries, "refusal": None}


def _entry(token: Spelled) -> dict[str, Any]:
    return {"token": token.name, "logprob": token.logprob, "bytes": list(token.data)}


def _columns(told: Sequence[Told] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    return {
        "tokens": [token.chosen.name for token in told],
        "token_logprobs": [token.chosen.logprob for token in told],
        # The chosen token is always among them; where two tokens are spelled alike, the likelier one stays.
        "top_logprobs": [
            {other.name: other.logprob for other in (*reversed(token.top), token.chosen)} for token in told
        ],
        "text_offset": [token.offset for token in told],
    }
