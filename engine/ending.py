"""When is an answer over? One rule for whoever draws the token: the prefill's first or any of decode's."""

from collections.abc import Sequence

from engine.api import EndReason, Sampling


def end_of(sampling: Sampling, output: Sequence[int]) -> EndReason | None:
    """Why the answer ends with the last token of `output`; None if it goes on."""
    if output[-1] in sampling.stop_tokens and len(output) >= sampling.min_tokens:
        return EndReason.STOP
    if len(output) >= sampling.max_tokens:
        return EndReason.LENGTH
    return None
