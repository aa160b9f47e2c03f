"""Prompts that are computed, and the way each takes to a decode instance: first computed, first served, as decode
engines do. One for which there is no room waits, and all behind it. Who waits still counts where room was promised
to it: those who are judged before their prefill must leave it that."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from conductor.admit import SOON_S, Candidate, Gate, Verdict
from conductor.admitted import Admitted
from conductor.ask import Limits, Refusal, Refused
from conductor.estimate import Estimates
from conductor.lengths import Lengths
from conductor.place import RETRY_NOBODY_S
from conductor.view import Instance, View


@dataclass(eq=False)
class _Waiting:
    """A choice that waits for room in decode."""

    admitted: Admitted
    choice: int
    told: asyncio.Future[Instance]
    instance: Instance
    """Where room was promised to it: it is entered there meanwhile."""

    @property
    def hurried(self) -> bool:
        """Whether it may not wait behind others: its time is up, or its request has its answer already."""
        admitted, wanted = self.admitted, self.admitted.wanted
        over = _now() > wanted.arrived_at + wanted.limits.ttft_s - SOON_S
        return over or wanted.promised or admitted.handed_over or admitted.refused is not None

    def enter(self) -> None:
        """It waits, and counts as about to come."""
        self.admitted.moved(self.choice, self.instance, _now())


class Computed:
    """The line after the prefill. `walk` must be called now and then; `poke` asks for that."""

    def __init__(
        self,
        view: View,
        gate: Gate,
        estimates: Estimates,
        lengths: Lengths,
        poke: Callable[[], None],
        bars: Callable[[Limits], bool],
    ) -> None:
        """`bars` says whether one with these limits may make others wait: as in the line before the prefill."""
        self._view = view
        self._gate = gate
        self._estimates = estimates
        self._lengths = lengths
        self._poke = poke
        self._bars = bars
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def hand_over(self, admitted: Admitted, choice: int) -> Instance:
        """Which decode instance goes on with this choice; it is entered there.

        Raises Refused: by policy at_decode, or since no decode instance is alive."""
        promised = admitted.aside(choice)
        assert promised is not None, "it has a place from its admission on"
        self._poke()  # there is more room where that was, or one more waits
        if not self._waiting or admitted.wanted.promised or admitted.handed_over:
            instance = self._offer(admitted, choice)
            if instance is not None:
                return instance
        waiting = _Waiting(admitted, choice, asyncio.get_running_loop().create_future(), promised)
        waiting.enter()
        self._waiting.append(waiting)
        try:
            return await waiting.told
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def walk(self) -> None:
        """Hand over those that fit by now, in order. Behind one that does not, and bars, only those move that are
        hurried."""
        blocked = False
        for waiting in self._waiting:
            waiting.admitted.aside(waiting.choice)  # who stands behind is in nobody's way
        for waiting in list(self._waiting):
            if waiting.told.done():
                continue  # its client has left in this turn of the loop, and takes it out
            if blocked and not waiting.hurried:
                continue
            try:
                instance = self._offer(waiting.admitted, waiting.choice)
            except Refused as refused:
                waiting.told.set_exception(refused)
            else:
                if instance is None:
                    blocked = blocked or self._bars(waiting.admitted.wanted.limits)
                    continue
                waiting.told.set_result(instance)
            self._waiting.remove(waiting)
        for waiting in self._waiting:
            waiting.enter()

    def _offer(self, admitted: Admitted, choice: int) -> Instance | None:
        """Give the choice a decode instance, and enter it there; None if it must wait. Raises Refused."""
        if admitted.refused is not None:
            raise admitted.refused
        wanted, now = admitted.wanted, _now()
        prompt = wanted.prompt
        candidate = Candidate(prompt.tokens, wanted.priority, wanted.limits, wanted.arrived_at, avoid=prompt.avoid)
        judge = self._gate.best if wanted.promised or admitted.handed_over else self._gate.hand_over
        judgement = judge(candidate, self._view, self._estimates, self._lengths, now)
        if judgement.verdict is Verdict.HOLD:
            return None
        if judgement.verdict is Verdict.REFUSE:
            admitted.refused = Refused(judgement.refusal(429))
            raise admitted.refused
        if judgement.decode is None:
            raise Refused(Refusal("no_decode", "; ".join(self._view.missing()), RETRY_NOBODY_S))
        admitted.moved(choice, judgement.decode, now, handed_over=True)
        admitted.handed_over = True
        return judgement.decode


def _now() -> float:
    return asyncio.get_running_loop().time()
