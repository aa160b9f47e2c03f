"""Where should a prompt go? Pure: believes the view, reads no clock, touches nothing.

Mooncake's Algorithm 1 (FAST'25, section 6): each prefill instance either uses the prefix that its own
home holds, or fetches a much longer one from elsewhere; the least predicted time to first token wins.
"""

from dataclasses import dataclass

from conductor import estimate
from conductor.ask import Refusal
from conductor.view import Instance, View
from kvcache_pool.api import Found
from protocol.ids import SegmentId
from protocol.registry import Pool

RETRY_NOBODY_S = 2.0
"""A pool without an instance is usually one that restarts: a supervisor needs a second or two."""


@dataclass(frozen=True)
class Prompt:
    """What placement needs to know of a request."""

    tokens: int
    reusable: int
    """Blocks of it that may be taken from the cache: all full ones, but the last token is always computed."""


@dataclass(frozen=True)
class Placement:
    """Where a request goes."""

    prefill: Instance
    decode: Instance
    reuse: int
    """Blocks of cached prefix to load."""
    near: SegmentId | None
    """The decode instance's home: where new blocks are stored."""
    ttft_s: float
    """The predicted time to first token."""


def place(view: View, prompt: Prompt, found: Found, balancing_threshold: float) -> Placement | Refusal:
    """Algorithm 1: the prefill instance of least predicted TTFT, the decode instance of least predicted step."""
    prefills, decodes = view.of(Pool.PREFILL), view.of(Pool.DECODE)
    missing = view.missing()
    if missing:
        pool = "prefill" if not prefills else "decode" if not decodes else "kvcache"
        return Refusal(f"no_{pool}", "; ".join(missing), RETRY_NOBODY_S)
    rates = estimate.PrefillRates(prefills)
    plans = [_plan(view, rates, instance, prompt, found, balancing_threshold) for instance in prefills]
    ttft_s, _, prefill, reuse = min(plans, key=lambda plan: plan[:2])
    decode = min(decodes, key=lambda instance: (estimate.step_s(instance), _load(instance), instance.name))
    return Placement(prefill, decode, reuse, view.home(decode), ttft_s)


def _plan(
    view: View,
    rates: estimate.PrefillRates,
    instance: Instance,
    prompt: Prompt,
    found: Found,
    threshold: float,
) -> tuple[float, str, Instance, int]:
    """Predicted TTFT on one instance, and how much of the prefix it would use."""
    layout = view.manifest.layout
    own = min(found.held.get(view.home(instance) or "", 0), prompt.reusable)
    best = min(found.reach, prompt.reusable)
    reuse, fetched = (best, best - own) if best > threshold * own else (own, 0)
    ttft_s = (
        estimate.transfer_s(layout, fetched)
        + rates.queue_s(instance)
        + rates.prefill_s(instance, prompt.tokens - reuse * layout.block_tokens)
    )
    return ttft_s, instance.name, instance, reuse


def _load(instance: Instance) -> tuple[int, int]:
    return len(instance.streams), sum(stream.context for stream in instance.streams.values())
