"""Requests as OpenAI's clients spell them: checked field by field, then turned into samplings."""

import logging
from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from conductor.problem import Problem, invalid
from conductor.unserved import require_served
from conductor.urgency import LIMIT_S_MAX, Tier, Urgency
from engine.api import TOP_LOGPROBS_MAX, Sampling

INT_MAX = 2**63 - 1
"""Integers cross processes as 64 bits."""

SEED_BITS = 63
CHOICES_MAX = 128
"""Answers to one HTTP request, over all its prompts: OpenAI's limit for `n`."""

STOPS_MAX = 4
STOP_CHARS_MAX = 1024
"""A stop string is held back while it may still come, and compared with every token."""

STOP_TOKENS_MAX = 64
MODEL_CHARS_MAX = 256
SALT_CHARS_MAX = 256

UNKNOWN_NAMES_MAX = 256
"""So many unknown fields are logged, each once: a client must not fill the log, nor our memory."""

REPETITION_PENALTY_MIN = 0.01
"""Logits are divided by it: near 0 they would overflow to infinity."""

Count = Annotated[int, Field(ge=0, le=INT_MAX)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
StopString = Annotated[StrictStr, Field(min_length=1, max_length=STOP_CHARS_MAX)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
LimitSeconds = Annotated[float, Field(gt=0.0, le=LIMIT_S_MAX)]
R = TypeVar("R", bound="Common")

logger = logging.getLogger(__name__)


def _stop_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return [] if value is None else value


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: the usage so far in every chunk."""


class Common(BaseModel):
    """What both endpoints take. Null means left out; ranges are OpenAI's, of the extras vLLM's."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    adds_special_tokens: ClassVar[bool]
    """Whether the beginning-of-text token is added to a prompt; a chat template writes its own."""

    model: Annotated[str, Field(max_length=MODEL_CHARS_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT_MAX)] | None = None
    min_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-INT_MAX - 1, le=INT_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=100.0)] | None = None
    stop: Annotated[list[StopString], BeforeValidator(_stop_list), Field(max_length=STOPS_MAX)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_TOKENS_MAX)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=SALT_CHARS_MAX)] | None = None
    """Prompts share cached KV only with prompts of the same salt."""
    service_tier: Tier | None = None
    """`flex` makes a request one of the batch class, every other tier an interactive one."""
    priority: Annotated[int, Field(ge=-INT_MAX - 1, le=INT_MAX)] | None = None
    """vLLM's, in which lower is earlier: more than 0 makes a request one of the batch class."""
    ttft_limit_s: LimitSeconds | None = None
    """Ours: the longest time to the first token, from arrival, by which admission judges."""
    tbt_limit_s: LimitSeconds | None = None
    """Ours: the longest time between tokens, by which admission judges."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        limit = self.output_tokens_max
        if limit is not None and (self.min_tokens or 0) > limit:
            raise PydanticCustomError("min_tokens", "min_tokens is larger than max_tokens")
        return self

    @property
    def output_tokens_max(self) -> int | None:
        """The client's own limit of the answer's length, if it set one."""
        return self.max_tokens

    @property
    @abstractmethod
    def top(self) -> int | None:
        """How many alternatives to report for each token; None for no logprobs at all."""

    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return self.include_usage() and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def urgency(self) -> Urgency:
        """Its class and its own limits."""
        return Urgency(self.service_tier, self.priority or 0, self.ttft_limit_s, self.tbt_limit_s)

    def samplings(self, room: int, end_tokens: Iterable[int], seed: int) -> list[Sampling]:
        """One for each choice; `room` tokens are left in the context, `seed` is used if the client gave none."""
        first = seed if self.seed is None else self.seed
        output = min(room, self.output_tokens_max or room)
        ends = [] if self.ignore_eos else list(end_tokens)
        return [
            Sampling(
                temperature=_or(self.temperature, 1.0),
                top_p=_or(self.top_p, 1.0),
                top_k=max(0, _or(self.top_k, 0)),
                min_p=_or(self.min_p, 0.0),
                seed=(first + choice) % (1 << SEED_BITS),
                presence_penalty=_or(self.presence_penalty, 0.0),
                frequency_penalty=_or(self.frequency_penalty, 0.0),
                repetition_penalty=_or(self.repetition_penalty, 1.0),
                logprobs=self.top,
                max_tokens=output,
                min_tokens=min(self.min_tokens or 0, output),
                stop_tokens=sorted({*ends, *(self.stop_token_ids or [])}),
            )
            for choice in range(self.n or 1)
        ]


class ChatRequest(Common):
    """The body of POST /v1/chat/completions. What is in a message is checked by the tokenizer's side."""

    adds_special_tokens = False

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None

    @model_validator(mode="after")
    def _logprobs_asked(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """The body of POST /v1/completions."""

    adds_special_tokens = True

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts in order, each as text or as token ids. Raises Problem."""
        if isinstance(self.prompt, str) or _is_tokens(self.prompt):
            return [self.prompt]
        if not isinstance(self.prompt, list) or not self.prompt:
            raise invalid(
                "prompt must be a string, a list of strings, or one or more lists of token ids.", "prompt"
            )
        texts = all(isinstance(entry, str) for entry in self.prompt)
        if not texts and not all(_is_tokens(entry) for entry in self.prompt):
            raise invalid("prompt mixes kinds: all strings, or all lists of token ids.", "prompt")
        if len(self.prompt) * (self.n or 1) > CHOICES_MAX:
            raise invalid(
                f"{len(self.prompt)} prompts x n = {self.n or 1}: at most {CHOICES_MAX} answers.", "prompt"
            )
        return self.prompt


class Reader:
    """Reads bodies. Owns the short memory of which unknown fields it has already told about."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def read(self, kind: type[R], body: dict[str, Any]) -> R:
        """The request that the body spells. Raises Problem naming the field that is wrong, or not served."""
        try:
            request = kind.model_validate(body)
        except ValidationError as error:
            raise _problem(kind, error) from None
        require_served(body, kind.adds_special_tokens)
        for name in request.model_extra or ():
            self._tell(name)
        return request

    def _tell(self, name: str) -> None:
        if name not in self._told and len(self._told) < UNKNOWN_NAMES_MAX:
            self._told.add(name)
            logger.debug("ignored unknown field %.64r", name)


def _problem(kind: type[Common], error: ValidationError) -> Problem:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"]) or first["type"]
    if param not in kind.model_fields and not first["loc"]:
        return invalid(f"The body: {first['msg']}")
    # A rule over several fields has no place; its error is named after the field at fault.
    missing = first["type"] == "missing"
    return invalid(f"{param}: {first['msg']}", param, "missing_required_parameter" if missing else "invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """`("stop", 1)` as `stop[1]`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in location]
    return "".join(steps).removeprefix(".")[:128]


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


N = TypeVar("N", int, float)


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
