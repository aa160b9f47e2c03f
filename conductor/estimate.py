"""Predicted times, from what instances report. Pure.

For now rates: a line through the origin. What is predicted here decides which instance is quickest.
"""

from collections.abc import Sequence

from conductor.view import Instance
from protocol.blocks import BlockLayout

PREFILL_TOKENS_S_UNKNOWN = 1000.0
"""Assumed while no prefill instance has computed anything yet. Equal for all, so it decides nothing."""

TRANSFER_BYTES_S = 2e9
"""Assumed of fetching a prefix from another segment: a cautious figure for one memory copy out and in."""


class PrefillRates:
    """Tokens a second of each prefill instance. One without samples is taken for an average one: were it
    taken for slow, it would get no work and so never a sample."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        known = [instance.load.tokens_s for instance in instances if instance.load.tokens_s]
        self._unknown = sum(known) / len(known) if known else PREFILL_TOKENS_S_UNKNOWN

    def queue_s(self, instance: Instance) -> float:
        """Until a prompt placed now would start: the work that was placed there and has not ended."""
        return sum(prompt.tokens for prompt in instance.prompts.values()) / self._of(instance)

    def prefill_s(self, instance: Instance, tokens: int) -> float:
        """To compute `tokens` there."""
        return tokens / self._of(instance)

    def _of(self, instance: Instance) -> float:
        return instance.load.tokens_s or self._unknown


def transfer_s(layout: BlockLayout, blocks: int) -> float:
    """To fetch `blocks` from a segment that is not the instance's home."""
    return blocks * layout.block_bytes / TRANSFER_BYTES_S


def step_s(instance: Instance) -> float:
    """A decode step there with one more request than were placed there; 0 while nothing is known of it."""
    running = max(instance.load.running, 1)
    return instance.load.step_s * (len(instance.streams) + 1) / running
