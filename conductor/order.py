"""From a body's bytes to prompts in tokens: all that is decided about a request before anyone serves it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from conductor.body import decode
from conductor.openai import ChatRequest, Common, CompletionRequest, Reader
from conductor.problem import Problem, invalid
from conductor.shapes import ChatShape, CompletionShape, Shape
from conductor.urgency import Urgency
from engine.api import PromptTooLong, Sampling
from engine.chat_template import MessageError, TemplateError, normalise_messages
from protocol.cluster import Manifest
from protocol.ids import Ids, token_ids


class Vocabulary(Protocol):
    """What turning tokens into text needs of the tokenizer."""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; a special token's spelling."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token, never shown as text."""
        ...


class Prompts(Vocabulary, Protocol):
    """What turning a request into tokens needs of the tokenizer."""

    stop_tokens: frozenset[int]
    """Tokens that end an answer."""

    @property
    def vocab(self) -> int:
        """Token ids are smaller than this."""
        ...

    def encode(self, text: str, *, special: bool, below: int | None = None) -> list[int]:
        """The tokens of a text; with `special`, the spellings of control tokens are these tokens.

        Raises PromptTooLong, untokenised, for a text that cannot be fewer than `below` tokens.
        """
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], *, below: int | None = None) -> list[int]:
        """The tokens of a conversation, ready for the assistant's turn. Raises TemplateError, PromptTooLong."""
        ...


@dataclass(frozen=True)
class Order:
    """One HTTP request, checked and tokenised: each prompt is answered in one choice per sampling."""

    shape: Shape
    prompts: list[Ids]
    samplings: list[list[Sampling]]
    """For each prompt: they differ by the room that the prompt leaves."""
    stops: list[str]
    salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    urgency: Urgency


class Orders:
    """Takes requests for one served model. Stateless but for the reader's memory: threads may share it."""

    def __init__(self, tokenizer: Prompts, manifest: Manifest) -> None:
        self._tokenizer = tokenizer
        self._manifest = manifest
        self._reader = Reader()
        self._context = manifest.context_tokens

    def chat(self, data: bytes, seed: int) -> Order:
        """An order from a chat request. `seed` is used if the client gave none. Raises Problem."""
        request = self._reader.read(ChatRequest, decode(data))
        self.require_model(request.model)
        prompt = self._checked(
            "messages",
            lambda: self._tokenizer.chat(normalise_messages(request.messages), below=self._context),
        )
        return self._order(request, ChatShape(), "messages", [prompt], seed)

    def completion(self, data: bytes, seed: int) -> Order:
        """An order from a completion request. `seed` is used if the client gave none. Raises Problem.

        A prompt in text may spell control tokens: this endpoint is for clients that write their own templates.
        """
        request = self._reader.read(CompletionRequest, decode(data))
        self.require_model(request.model)
        prompts = [self._tokens(prompt) for prompt in request.prompts()]
        return self._order(request, CompletionShape(), "prompt", prompts, seed)

    def _order(self, request: Common, shape: Shape, param: str, prompts: list[list[int]], seed: int) -> Order:
        self._require_known(request.stop_token_ids or [], "stop_token_ids")
        ends = self._tokenizer.stop_tokens
        choices = request.n or 1
        return Order(
            shape=shape,
            prompts=[token_ids(prompt) for prompt in prompts],
            samplings=[
                request.samplings(self._room(prompt, param), ends, seed + number * choices)
                for number, prompt in enumerate(prompts)
            ],
            stops=request.stop,
            salt=request.cache_salt or "",
            stream=bool(request.stream),
            include_usage=request.include_usage(),
            continuous_usage=request.continuous_usage(),
            urgency=request.urgency(),
        )

    def require_model(self, name: str | None) -> None:
        """Raises Problem for the name of a model that is not served. None means whichever is."""
        if name is not None and name != self._manifest.model:
            message = f"The model {name!r} does not exist here; {self._manifest.model!r} is served."
            raise Problem(404, message, param="model", code="model_not_found")

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._checked(
                "prompt", lambda: self._tokenizer.encode(prompt, special=True, below=self._context)
            )
        self._require_known(prompt, "prompt")
        return prompt

    def _require_known(self, tokens: list[int], param: str) -> None:
        size = self._tokenizer.vocab
        if not all(0 <= token < size for token in tokens):
            raise invalid(f"Token ids must be from 0 to {size - 1}.", param)

    def _checked(self, param: str, tokenise: Callable[[], list[int]]) -> list[int]:
        try:
            tokens = tokenise()
        except MessageError as error:
            raise invalid(str(error), error.field) from None
        except TemplateError as error:
            raise invalid(str(error), param, "template_refused") from None
        except PromptTooLong as error:
            raise self._too_long(f"at least {error.at_least}", param) from None
        if not tokens:
            raise invalid(f"{param} is empty: there is nothing to go on from.", param)
        return tokens

    def _room(self, prompt: list[int], param: str) -> int:
        """Tokens that the answer may have. A longer max_tokens is cut to it, and ends with reason `length`."""
        if len(prompt) >= self._context:
            raise self._too_long(str(len(prompt)), param)
        return self._context - len(prompt)

    def _too_long(self, tokens: str, param: str) -> Problem:
        return invalid(
            f"The context is {self._context} tokens, but the prompt alone has {tokens} tokens, "
            "and an answer needs one at least.",
            param,
            "context_length_exceeded",
        )
