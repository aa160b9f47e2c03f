"""What an instance has heard from its Conductors, made one: where the directory is, and whom to report to. Pure.

Conductors need not agree. One that has just started knows nobody yet, one that is cut off knows what was. So
nothing that one still says is forgotten because another does not say it, and while nobody answers all stays.
"""

from collections.abc import Sequence
from dataclasses import replace

from protocol.registry import DEAD_AFTER_REPORTS, Heard

CONDUCTORS_MAX = 16
"""Each costs a connection and a report every period; a cluster has two or three."""


class Hearsay:
    """The last answer of each Conductor. Mutates: hear."""

    def __init__(self, configured: Sequence[str]) -> None:
        """`configured`: addresses that are reported to whatever anybody says."""
        self._configured = list(dict.fromkeys(configured))
        self._said: dict[str, tuple[Heard, float]] = {}

    def hear(self, conductor: str, news: Heard, now: float) -> Heard:
        """Take in an answer; returns what all say together: of each thing, what the first says that knows it."""
        self._said[conductor] = (news, now)
        wanted = self.conductors(now)
        self._said = {address: said for address, said in self._said.items() if address in wanted}
        in_order = [self._said[address][0] for address in wanted if address in self._said]
        directory = next((said.directory for said in in_order if said.directory is not None), None)
        home = next((said.home for said in in_order if said.home is not None), None)
        return replace(news, directory=directory, home=home)

    def conductors(self, now: float) -> list[str]:
        """Whom to report to: the configured, whoever answers, and whom those name who answer."""
        answering = {address: said for address, (said, at) in self._said.items() if _fresh(said, now - at)}
        if not answering:
            answering = {address: said for address, (said, _) in self._said.items()}
        named = {other for said in answering.values() for other in said.conductors}
        others = sorted((named | answering.keys()) - set(self._configured))
        return (self._configured + others)[:CONDUCTORS_MAX]


def _fresh(said: Heard, age_s: float) -> bool:
    return age_s <= DEAD_AFTER_REPORTS * said.report_s
