"""Which chunk is computed next? Pure: no clock, no tensor, no await.

waiting ──start──> started ──next/advance──> computed ──remove──> gone
(no pages)         (has pages: its prefix loads       (its last layers may still
                    while others compute)              be stored from its pages)
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.paging import Pages, pages_for
from protocol.ids import RequestId


@dataclass
class Prompt:
    """A prompt under way. `computed` counts tokens whose KV is in the pages, loaded ones included."""

    request: RequestId
    tokens: int
    reused: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return self.tokens - max(self.computed, self.reused)


class Chunk(NamedTuple):
    """Tokens [start, end) of one prompt: the work of one pass."""

    prompt: Prompt
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the prompt is computed after this."""
        return self.end == self.prompt.tokens


class Schedule:
    """The prompts of one instance, first come first served.

    Always: a started prompt holds pages for all its tokens, so it can run to its end; a waiting one holds
    none, so it blocks nobody. Mutates: add, start, advance, remove.
    """

    def __init__(self, pages: Pages, block_tokens: int, chunk_tokens: int, prompts_max: int) -> None:
        assert chunk_tokens % block_tokens == 0, "a chunk is a whole number of blocks"
        self._pages = pages
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._prompts_max = prompts_max
        self._waiting: OrderedDict[RequestId, Prompt] = OrderedDict()
        self._started: OrderedDict[RequestId, Prompt] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Prompts without pages."""
        return len(self._waiting)

    @property
    def started(self) -> int:
        """Prompts with pages."""
        return len(self._started)

    @property
    def tokens_left(self) -> int:
        """Tokens that all prompts here still have to compute."""
        prompts = [*self._waiting.values(), *self._started.values()]
        return sum(prompt.left for prompt in prompts)

    def fits(self, tokens: int) -> bool:
        """Whether a prompt of this length could ever run here."""
        return pages_for(tokens, self._block_tokens) <= self._pages.total

    def add(self, prompt: Prompt) -> bool:
        """Queue a prompt. False, and nothing changed, if the queue is full or it is here already."""
        known = prompt.request in self._waiting or prompt.request in self._started
        if known or self.waiting + self.started >= self._prompts_max:
            return False
        self._waiting[prompt.request] = prompt
        return True

    def start(self) -> list[Prompt]:
        """Give pages to waiting prompts, in order, as long as there are enough; returns whom."""
        begun = []
        while self._waiting:
            prompt = next(iter(self._waiting.values()))
            pages = self._pages.take(pages_for(prompt.tokens, self._block_tokens))
            if pages is None:
                break  # no overtaking: a long prompt would starve behind short ones
            del self._waiting[prompt.request]
            prompt.pages, prompt.computed = pages, prompt.reused
            self._started[prompt.request] = prompt
            begun.append(prompt)
        return begun

    def next(self) -> Chunk | None:
        """The next chunk to compute; None when no started prompt has any left. Changes nothing."""
        for prompt in self._started.values():
            if prompt.computed < prompt.tokens:
                end = min(prompt.computed + self._chunk_tokens, prompt.tokens)
                return Chunk(prompt, prompt.computed, end)
        return None

    def advance(self, chunk: Chunk) -> None:
        """The chunk has been computed."""
        assert chunk.prompt.computed == chunk.start
        chunk.prompt.computed = chunk.end

    def abandon(self, request: RequestId) -> None:
        """Compute no more of this prompt; its pages stay until `remove`."""
        prompt = self._waiting.get(request) or self._started.get(request)
        if prompt is not None:
            prompt.computed = prompt.tokens

    def remove(self, request: RequestId) -> None:
        """Forget a prompt and free its pages. Nobody may touch them any more."""
        prompt = self._waiting.pop(request, None) or self._started.pop(request, None)
        if prompt is not None:
            self._pages.give(prompt.pages)

    def check(self) -> None:
        """Asserts that pages are conserved and held only by started prompts."""
        self._pages.check()
        held = sum(len(prompt.pages) for prompt in self._started.values())
        assert held + self._pages.free == self._pages.total
        assert not any(prompt.pages for prompt in self._waiting.values())
