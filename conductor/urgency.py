"""How urgent a request is: its class, and the latency that it, or else its class, allows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from conductor.ask import Limits, Priority
from conductor.config import ConductorConfig
from conductor.problem import invalid

LIMIT_S_MAX = 3600.0
"""A limit beyond an hour is a mistake of units, not a wish."""

TTFT_HEADER = "X-Dango-Ttft-Limit-S"
TBT_HEADER = "X-Dango-Tbt-Limit-S"

Tier = Literal["auto", "default", "priority", "scale", "flex"]
"""OpenAI's service tiers. `flex` is the one that may wait."""


@dataclass(frozen=True)
class Urgency:
    """What a request's body says of it."""

    tier: Tier | None = None
    rank: int = 0
    """vLLM's `priority`: lower is earlier."""
    ttft_s: float | None = None
    tbt_s: float | None = None

    @property
    def priority(self) -> Priority:
        """Batch if either field says that the request may wait."""
        return Priority.BATCH if self.tier == "flex" or self.rank > 0 else Priority.INTERACTIVE

    @property
    def served_tier(self) -> str | None:
        """The tier that the answer names, as OpenAI's do; None if the request named none."""
        if self.tier is None:
            return None
        return "flex" if self.priority is Priority.BATCH else "default"

    def with_headers(self, headers: Mapping[str, str]) -> "Urgency":
        """With the headers' limits where the body names none. Raises Problem."""
        return replace(
            self,
            ttft_s=self.ttft_s or _number(headers, TTFT_HEADER),
            tbt_s=self.tbt_s or _number(headers, TBT_HEADER),
        )

    def limits(self, config: ConductorConfig) -> Limits:
        """Its own limits, or else those of its class."""
        batch = self.priority is Priority.BATCH
        ttft_s = self.ttft_s or (config.batch_ttft_limit_s if batch else config.ttft_limit_s)
        tbt_s = self.tbt_s or (config.batch_tbt_limit_s if batch else config.tbt_limit_s)
        return Limits(ttft_s or math.inf, tbt_s or math.inf)


def _number(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LIMIT_S_MAX:
        raise invalid(f"{name} must be a number of seconds, more than 0 and at most {LIMIT_S_MAX:g}.", name)
    return value
