"""What an engine promises: tokens in, logits out, KV in pages. No tensor and no torch crosses this file."""

import asyncio
from collections.abc import Sequence
from dataclasses import field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from protocol.blocks import BlockLayout
from protocol.message import Message

TOP_LOGPROBS_MAX = 20
"""OpenAI's limit; also what keeps a token's event small."""


class Sampling(Message):
    """How to choose tokens. Validated at the edge; here only what would break the arithmetic is refused."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    seed: int = 0
    """With a token's position it fixes the random number that draws it: no state crosses processes."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token's logprob; None reports nothing."""
    max_tokens: int = 1
    """The output ends at this length, counted from the first token of the answer."""
    min_tokens: int = 0
    """Until the output has this length, no stop token may be drawn."""
    stop_tokens: list[int] = field(default_factory=list)
    """Tokens that end the output (end of turn included, unless the client ignores it). They are reported."""


class Sampled(Message):
    """One chosen token. Logprobs are of the model's own distribution, before temperature and penalties."""

    token: int
    logprob: float | None = None
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


class EndReason(Enum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Draw(NamedTuple):
    """A token to sample after a pass: how, and what was said so far (for penalties and the position)."""

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]


class Row(NamedTuple):
    """One request's part of a pass: compute `tokens` at positions `start`, `start + 1`, ...

    `pages` are the engine pages of the request's whole context, in order: token t lives in
    `pages[t // block_tokens]`. KV of positions before `start` is already there. After the pass one token
    is sampled for each of `draws`, all from the logits of the row's last token; none for no draws.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    draws: Sequence[Draw] = ()


class PromptTooLong(ValueError):
    """A prompt that, going by its size alone, has `at_least` tokens: more than it may have."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens")
        self.at_least = at_least


class Pass(Protocol):
    """A forward pass under way, advanced layer by layer."""

    async def layer(self, layer: int) -> None:
        """Compute one layer; its KV is then in the pages. Layers go in order, 0 first."""
        ...

    async def finish(self) -> list[list[Sampled]]:
        """After the last layer: what was drawn, for each row one for each of its draws."""
        ...


class Engine(Protocol):
    """A model with paged KV memory. One pass at a time; callers await the end of one before the next."""

    layout: BlockLayout
    pages: int
    """How many pages there are, numbered from 0."""
    context_tokens: int
    """The longest context that the model was made for."""

    def begin(self, rows: Sequence[Row]) -> Pass:
        """Start a pass that the caller drives layer by layer."""
        ...

    async def step(self, rows: Sequence[Row]) -> list[list[Sampled]]:
        """A whole pass at once: `begin`, every layer, `finish`, in one go."""
        ...

    async def run(self, rows: Sequence[Row], steps: int, enough: asyncio.Event) -> list[list[Sampled]]:
        """Up to `steps` decode steps of an unchanging batch; each row has one token and one draw.

        A step computes the token that the step before drew, so a row's pages hold `start + steps` tokens. The run
        ends after a step in which the answer of any row ended (`engine.ending.end_of`), and after any step once
        `enough` is set. Returns each row's tokens: equally many for all, at least one.
        """
        ...

    def runs(self, layer: int) -> npt.NDArray[np.uint8]:
        """The KV of one layer, shape [pages, run_bytes], a view: writing it writes the cache."""
        ...

    def block(self, page: int) -> npt.NDArray[np.uint8]:
        """The KV of one page in all layers, shape [layers, run_bytes], a view; each run lies in one piece."""
        ...

    def close(self) -> None:
        """Stop the engine's thread."""
        ...
