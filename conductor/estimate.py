"""Predicted times, from what instances report. Pure.

For now rates: a line through the origin. What is predicted here decides which instance is quickest.
"""

from conductor.view import Instance
from protocol.blocks import BlockLayout

PREFILL_TOKENS_S_UNKNOWN = 1000.0
"""Assumed of an instance that has not computed anything yet; equal for all such, so it only breaks no tie."""

TRANSFER_BYTES_S = 2e9
"""Assumed of fetching a prefix from another segment: a cautious figure for one memory copy out and in."""


def queue_s(instance: Instance) -> float:
    """Until a prompt placed now would start: the work that was placed there and has not ended."""
    return instance.placed_tokens / _rate(instance)


def prefill_s(instance: Instance, tokens: int) -> float:
    """To compute `tokens` there."""
    return tokens / _rate(instance)


def transfer_s(layout: BlockLayout, blocks: int) -> float:
    """To fetch `blocks` from a segment that is not the instance's home."""
    return blocks * layout.block_bytes / TRANSFER_BYTES_S


def step_s(instance: Instance, more: int) -> float:
    """A decode step with `more` requests than now, from the last reported step; 0 when nothing is known."""
    running = max(instance.load.running, 1)
    return instance.load.step_s * (len(instance.placed) + more) / running


def _rate(instance: Instance) -> float:
    return instance.load.tokens_s or PREFILL_TOKENS_S_UNKNOWN
