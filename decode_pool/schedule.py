"""Who joins the batch, who waits, who is preempted? Pure: no clock, no tensor, no await.

    waiting ──admit──> loading ──join──> running ──remove──> gone
    (no pages)         (has pages)          │  ^
       ^                                preempt│(recomputes what it lost, beside the batch)
       └────────────────────────────────────┘  │
                                   admit, with nothing to load

The oldest running request is preempted last, and no request is let in that could not run alone: so the
batch always moves on. (It gives way itself only when all other pages are being loaded into; those join next.)
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.paging import Pages, pages_for
from protocol.ids import Ids

Key = tuple[str, int]
"""Request and choice."""


@dataclass
class Sequence:
    """One answer under way. `tokens` grows with every step; KV of the first `computed` is in `pages`."""

    key: Key
    tokens: Ids
    stored: int
    """How many tokens' KV the pool holds for it; 0 once it has lost its pages."""
    chunk: int = 0
    """Most tokens that a step computes of it, if that is fewer than for all; 0: no fewer."""
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens without KV: 1 for a sequence that simply goes on, more for one that lost some."""
        return len(self.tokens) - self.computed


class Plan(NamedTuple):
    """One sequence's part of a step: compute tokens [start, end)."""

    sequence: Sequence
    start: int
    end: int
    draws: bool
    """Whether that reaches its last token, so that the step draws a new one."""

    @property
    def plain(self) -> bool:
        """Whether it only goes on: one token to compute, one to draw."""
        return self.draws and self.end == self.start + 1


class Schedule:
    """The sequences of one instance. Mutates: add, admit, join, step, advance, remove."""

    def __init__(self, pages: Pages, block_tokens: int, batch_max: int, queue_max: int, chunk: int) -> None:
        self._pages = pages
        self._block_tokens = block_tokens
        self._batch_max = batch_max
        self._queue_max = queue_max
        self._chunk_tokens = chunk
        self._waiting: OrderedDict[Key, Sequence] = OrderedDict()
        self._loading: dict[Key, Sequence] = {}
        self._running: OrderedDict[Key, Sequence] = OrderedDict()
        self.preempted = 0
        """Since the start."""

    @property
    def waiting(self) -> int:
        """Sequences without pages."""
        return len(self._waiting)

    @property
    def loading(self) -> int:
        """Sequences whose KV is on its way."""
        return len(self._loading)

    @property
    def pages_loading(self) -> int:
        """Pages of those."""
        return sum(len(sequence.pages) for sequence in self._loading.values())

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV the next step reads."""
        return sum(len(sequence.tokens) for sequence in self._running.values())

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of this length could run here alone."""
        return pages_for(tokens, self._block_tokens) <= self._pages.total

    def add(self, sequence: Sequence) -> bool:
        """Queue a sequence. False, and nothing changed, if the queue is full or it is here already."""
        known = any(sequence.key in group for group in (self._waiting, self._loading, self._running))
        if known or self.waiting + self.loading + self.running >= self._queue_max:
            return False
        self._waiting[sequence.key] = sequence
        return True

    def admit(self) -> list[Sequence]:
        """Give pages to waiting sequences, in order, while there is room; they are loading then.

        One page stays free for each sequence that is here already: all fill their last page sooner or later, and
        whoever is let in today at the price of a preemption tomorrow costs everybody a recomputation.
        """
        admitted = []
        while self._waiting and self.loading + self.running < self._batch_max:
            sequence = next(iter(self._waiting.values()))
            wanted, spare = pages_for(len(sequence.tokens), self._block_tokens), self.loading + self.running
            pages = self._pages.take(wanted) if wanted + spare <= self._pages.free else None
            if pages is None:
                break  # no overtaking: a long request would starve behind short ones
            del self._waiting[sequence.key]
            sequence.pages = pages
            self._loading[sequence.key] = sequence
            admitted.append(sequence)
        return admitted

    def join(self, sequence: Sequence, computed: int) -> None:
        """The KV of the first `computed` tokens has been loaded; run from the next step on."""
        del self._loading[sequence.key]
        sequence.computed = min(computed, len(sequence.tokens) - 1)
        self._running[sequence.key] = sequence

    def step(self, hindered: Callable[[Sequence], None]) -> list[Plan]:
        """The next step. Sequences that must give up their pages for it are told to `hindered`."""
        plans = []
        for sequence in list(self._running.values()):
            if sequence.key in self._running and self._make_room(sequence, hindered):
                chunk = min(sequence.chunk or self._chunk_tokens, self._chunk_tokens)
                end = min(sequence.computed + chunk, len(sequence.tokens))
                plans.append(Plan(sequence, sequence.computed, end, end == len(sequence.tokens)))
        return [plan for plan in plans if plan.sequence.key in self._running]

    def steps_on(self, plans: list[Plan]) -> int:
        """How many steps these plans, all plain, can go on alike: until the first fills the last of its pages."""
        return min(len(plan.sequence.pages) * self._block_tokens - plan.start for plan in plans)

    def advance(self, plan: Plan, drawn: list[int]) -> None:
        """A plan has been computed, and so have all tokens that it drew but the last."""
        plan.sequence.computed = plan.end + max(len(drawn) - 1, 0)
        plan.sequence.tokens.extend(drawn)

    def remove(self, key: Key) -> None:
        """Forget a sequence and free its pages. Nobody may touch them any more."""
        found = [group.pop(key) for group in (self._waiting, self._loading, self._running) if key in group]
        for sequence in found:
            self._pages.give(sequence.pages)
            sequence.pages = []

    def _make_room(self, sequence: Sequence, hindered: Callable[[Sequence], None]) -> bool:
        """A page for every token of this step, taken from the youngest if need be. False: it was the youngest."""
        missing = pages_for(len(sequence.tokens), self._block_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        while missing > self._pages.free:
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            hindered(youngest)
            if youngest is sequence:
                return False
        taken = self._pages.take(missing)
        assert taken is not None
        sequence.pages.extend(taken)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.key]
        self._pages.give(sequence.pages)
        sequence.pages, sequence.computed, sequence.stored = [], 0, 0
        self._waiting[sequence.key] = sequence
        self._waiting.move_to_end(sequence.key, last=False)  # it was here before those who wait
        self.preempted += 1

    def check(self) -> None:
        """Asserts that pages are conserved and nobody is in two states."""
        self._pages.check()
        held = [*self._loading.values(), *self._running.values()]
        assert sum(len(sequence.pages) for sequence in held) + self._pages.free == self._pages.total
        assert not any(sequence.pages for sequence in self._waiting.values())
        assert not (self._waiting.keys() & self._loading.keys() | self._waiting.keys() & self._running.keys())
        assert all(sequence.computed < len(sequence.tokens) for sequence in self._running.values())
