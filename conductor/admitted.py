"""A request's entries in the ledger, from its admission to its end.

admitted ──> prefilled ──> moved (each choice: to its decode instance) ──> joined ──> said ... ──> ended
    └── its decode instance computes the rest: settled at once ──> joined ──> prefilled, said ... ──> ended
"""

from collections.abc import Callable
from dataclasses import dataclass

from conductor.ask import Limits, Priority, Refused
from conductor.place import Placement, Prompt
from conductor.rest import Rest
from conductor.view import Instance, Key, Prefilling, Stream, View
from protocol.ids import RequestId


@dataclass
class Told:
    """What the client of a request has heard, over all attempts at it."""

    admitted: bool = False
    prefilled: bool = False
    tokens: bool = False
    """Some of any choice."""
    apart: bool = False
    """Not heard, but owed: its choices were placed again, each by itself, and none may be refused alone."""


@dataclass(frozen=True)
class Wanted:
    """A request, as admission sees it."""

    request: RequestId
    prompt: Prompt
    choices: list[int]
    priority: Priority
    limits: Limits
    arrived_at: float
    ends_at: float
    """Its own deadline: no hold outlasts it."""
    told: Told

    @property
    def promised(self) -> bool:
        """Part of its answer is out already, or may be by another choice: it is not judged again."""
        return self.told.tokens or self.told.apart


class Admitted:
    """One attempt at a request. A context manager: leaving it takes out of the ledger what is still there.

    `clock` tells the time, and `left` is called whenever an instance has more room than before.
    """

    def __init__(
        self,
        view: View,
        wanted: Wanted,
        plan: Placement,
        decode: Instance,
        clock: Callable[[], float],
        left: Callable[[], None],
        rest: Rest | None = None,
    ) -> None:
        self.wanted = wanted
        self.plan = plan
        self.rest = rest
        """What its decode instance computes without a prefill instance; None: it goes through prefill."""
        self.ttft_s = plan.ttft_s if rest is None else rest.ttft_s
        """Predicted, from now."""
        self.began_at = clock()
        self.handed_over = False
        """One of its choices has a place in decode for good, so the others get theirs."""
        self.refused: Refused | None = None
        """One of its choices was refused that, so the others are."""
        self._view = view
        self._clock = clock
        self._left = left
        self._in_prefill = True
        self._decodes: dict[int, Instance] = {}
        if rest is None:
            source, fetched_bytes = plan.source, plan.fetched_bytes
            prefix = plan.reuse * view.manifest.layout.block_tokens
            work = Prefilling(wanted.prompt.tokens - prefix, prefix, plan.work_s, self.began_at)
            view.enter(plan.prefill, self._key(wanted.choices[0]), work)
        else:
            source, fetched_bytes = rest.source, rest.loaded_bytes
        self._fetches = None if source is None else (source, fetched_bytes)
        if self._fetches is not None:
            view.send(*self._fetches)
        for choice in wanted.choices:
            self.moved(choice, decode, self.began_at + self.ttft_s, handed_over=rest is not None)

    def __enter__(self) -> "Admitted":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything out."""
        self.prefilled()
        for choice in list(self._decodes):
            self.gone(choice)

    def prefilled(self) -> None:
        """The prompt is computed, or will not be."""
        if not self._in_prefill:
            return
        self._in_prefill = False
        self._view.release(self.plan.prefill, self._key(self.wanted.choices[0]), self._clock())
        if self._fetches is not None:
            self._view.sent(*self._fetches)
        self._left()

    def moved(self, choice: int, instance: Instance, due_at: float, *, handed_over: bool = False) -> None:
        """The choice goes to this decode instance, and should be there at `due_at`."""
        wanted = self.wanted
        stream = Stream(
            wanted.prompt.tokens,
            due_at,
            wanted.priority,
            tbt_s=wanted.limits.tbt_s,
            handed_over=handed_over,
            rest_s=0.0 if self.rest is None else self.rest.more_s,
        )
        self._decodes[choice] = instance
        self._view.enter(instance, self._key(choice), stream)

    def joined(self, choice: int) -> Instance:
        """Its KV is there: it decodes from now on. Returns where."""
        instance = self._decodes[choice]
        self._view.joined(instance, self._key(choice), self._clock())
        return instance

    def said(self, choice: int, tokens: int) -> None:
        """So many more of its tokens have come."""
        self._view.said(self._decodes[choice], self._key(choice), tokens, self._clock())

    def decode(self, choice: int) -> Instance:
        """Its decode instance."""
        return self._decodes[choice]

    def stream(self, choice: int) -> Stream | None:
        """Its entry on its decode instance."""
        instance = self._decodes.get(choice)
        return None if instance is None else instance.streams.get(self._key(choice))

    def gone(self, choice: int) -> None:
        """It loads its decode instance no more."""
        if self.aside(choice) is not None:
            self._left()

    def aside(self, choice: int) -> Instance | None:
        """Take it out for the moment in which it is judged, or one that stands before it; `moved` must follow.
        Returns where it was."""
        instance = self._decodes.pop(choice, None)
        if instance is not None:
            self._view.release(instance, self._key(choice), self._clock())
        return instance

    def _key(self, choice: int) -> Key:
        return self.wanted.request, choice
