"""Answers as they grow: tokens in, text out, told at once or at the end. Where the dispatcher's tokens go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conductor.logprobs import Teller
from conductor.metrics import Metrics
from conductor.order import Vocabulary
from conductor.shapes import Head, Shape, Told, Usage, chunk, event
from conductor.sse import EventStream
from conductor.text import TextAssembler
from decode_pool.api import Tokens
from engine.api import EndReason, Sampled, Sampling


@dataclass(frozen=True)
class Piece:
    """What one more token did to a choice, or its end."""

    text: str
    """Ready to be shown; empty while a character or a possible stop string is incomplete."""
    told: Told | None
    first: bool
    reason: EndReason | None = None
    """Set when the choice is over with this piece."""


class Choice:
    """One choice. Owns its text and its logprobs; after a piece with a reason it is over."""

    def __init__(self, index: int, vocabulary: Vocabulary, stops: Sequence[str], sampling: Sampling) -> None:
        self.index = index
        self.tokens = 0
        self.reason: EndReason | None = None
        self.told: list[Told] | None = None if sampling.logprobs is None else []
        self._hidden = frozenset(sampling.stop_tokens)
        self._min_tokens = sampling.min_tokens
        self._assembler = TextAssembler(vocabulary.token_bytes, vocabulary.is_special, stops)
        self._teller = Teller(vocabulary, self._hidden)
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All that is shown so far."""
        return "".join(self._shown)

    def push(self, sampled: Sampled) -> Piece:
        """One more token."""
        assert self.reason is None, "a token after the end"
        first = self.tokens == 0
        self.tokens += 1
        told = None
        if self.told is not None:
            told = self._teller.tell(sampled)
            self.told.append(told)
        text = ""
        if sampled.token not in self._hidden:
            delta = self._assembler.push(sampled.token, match_stops=self.tokens >= self._min_tokens)
            text = delta.text
            self.reason = EndReason.STOP if delta.finished else None
        self._shown.append(text)
        return Piece(text, told, first, self.reason)

    def end(self, reason: EndReason) -> Piece:
        """No more tokens: what was held back is shown."""
        assert self.reason is None, "a second end"
        self.reason = reason
        text = self._assembler.flush()
        self._shown.append(text)
        return Piece(text, None, self.tokens == 0, reason)


class Listener(Protocol):
    """Whoever is told of each piece while the answer grows."""

    async def hear(self, choice: Choice, piece: Piece, usage: Usage) -> None:
        """A choice has grown or ended. May wait; may raise ClientGone."""
        ...


class Silence:
    """The listener of an answer that is sent as a whole."""

    async def hear(self, choice: Choice, piece: Piece, usage: Usage) -> None:
        """Nothing to do."""


class Chunks:
    """The listener of a streamed answer: one chunk for each token, one for each end."""

    def __init__(self, stream: EventStream, shape: Shape, head: Head, *, with_usage: bool) -> None:
        self._stream = stream
        self._shape = shape
        self._head = head
        self._with_usage = with_usage

    async def hear(self, choice: Choice, piece: Piece, usage: Usage) -> None:
        """A stop string ends a choice in the chunk of the token that completed it."""
        reason = None if piece.reason is None else piece.reason.value
        delta = self._shape.delta(choice.index, piece.text, piece.told, first=piece.first, reason=reason)
        told = usage if self._with_usage else None
        await self._stream.send(event(chunk(self._shape, self._head, [delta], told)))


class Watch:
    """Times one request for the metrics: its first token, and the gaps between the tokens of each choice."""

    def __init__(self, metrics: Metrics, now: Callable[[], float], arrived: float) -> None:
        self._metrics = metrics
        self._now = now
        self._arrived = arrived
        self._last: dict[int, float] = {}

    def token(self, choice: int, ago: float) -> None:
        """A token of a choice came, drawn `ago` seconds before the last of those that came with it."""
        at = self._now() - ago
        if not self._last:
            self._metrics.first_token(at - self._arrived)
        elif choice in self._last:
            self._metrics.next_token(max(at - self._last[choice], 0.0))
        self._last[choice] = at
        self._metrics.generated()

    def prefilled(self, tokens: int, reused_tokens: int) -> None:
        """A prompt is there."""
        self._metrics.prompt(tokens, reused_tokens)

    def ended(self, choice: Choice) -> None:
        """A choice is complete."""
        assert choice.reason is not None
        self._metrics.choice_ended(choice.reason, choice.tokens)


class Answer:
    """All choices of one HTTP request, in order: those of its first prompt, then those of its second, ..."""

    def __init__(self, choices: list[Choice], prompt_tokens: int, listener: Listener, watch: Watch) -> None:
        """`prompt_tokens` of all prompts together."""
        self.choices = choices
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._listener = listener
        self._watch = watch

    def usage(self) -> Usage:
        """The tokens so far."""
        return Usage(self._prompt_tokens, sum(choice.tokens for choice in self.choices), self._cached_tokens)

    def require_complete(self) -> None:
        """Asserts that every choice has ended: a truncated answer must not pass for a whole one."""
        assert all(choice.reason is not None for choice in self.choices), "served, but a choice has no end"

    def prefilled(self, prompt_tokens: int, reused_tokens: int) -> None:
        """One prompt of so many tokens is there; some of them were not computed anew."""
        self._cached_tokens += reused_tokens
        self._watch.prefilled(prompt_tokens, reused_tokens)

    async def tokens(self, index: int, said: Tokens) -> bool:
        """The next tokens of a choice; False if it needs no more. Nothing after a stop string is told."""
        choice = self.choices[index]
        ago_s = sum(said.took_s)
        for took_s, sampled in zip(said.took_s, said.details or map(Sampled, said.tokens), strict=True):
            ago_s -= took_s  # of the steps after the one that drew it
            self._watch.token(index, ago_s)
            piece = choice.push(sampled)
            await self._heard(choice, piece)
            if piece.reason is not None:
                return False
        return True

    async def end(self, index: int, reason: EndReason) -> None:
        """A choice's last token has come."""
        choice = self.choices[index]
        await self._heard(choice, choice.end(reason))

    async def _heard(self, choice: Choice, piece: Piece) -> None:
        if piece.reason is not None:
            self._watch.ended(choice)
        await self._listener.hear(choice, piece, self.usage())


class Part:
    """The Reply for one prompt: the answer's choices from `first` on."""

    def __init__(self, answer: Answer, first: int, prompt_tokens: int) -> None:
        self._answer = answer
        self._first = first
        self._prompt_tokens = prompt_tokens

    def admitted(self) -> None:
        """See Reply. The client is told nothing yet."""

    def prefilled(self, reused_tokens: int) -> None:
        """See Reply."""
        self._answer.prefilled(self._prompt_tokens, reused_tokens)

    async def tokens(self, choice: int, said: Tokens) -> bool:
        """See Reply."""
        return await self._answer.tokens(self._first + choice, said)

    async def end(self, choice: int, reason: EndReason) -> None:
        """See Reply."""
        await self._answer.end(self._first + choice, reason)
