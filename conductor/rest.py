"""Should the decode instance compute the rest of a prompt itself? Pure: believes the view, reads no clock.

    through prefill    fetch | queue | rest          first token | KV to decode
    on decode          load | rest of a step | step + chunk | ... | first token

The trip through prefill is worth its messages and its moving of KV for long rests. A short one is there sooner
beside the batch of the decode instance, whose steps take a little longer for it: never so long that the strictest
limit of the time between tokens would be broken, since each is a gap between two tokens of every stream there. How
short a rest must be is nowhere set: it follows from the predicted times.

Whoever else comes, and whatever is stricter or longer, only speaks against it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from conductor.ask import Limits
from conductor.estimate import PassLine, StepLine
from conductor.place import Placement, Prompt, Scene, longest_two
from conductor.view import Instance, Stream
from kvcache_pool.api import Found
from protocol.ids import SegmentId

CHUNK_MIN = 16
"""Smaller chunks are not tried: each costs a step, and would hardly be shorter than one without."""


@dataclass(frozen=True)
class Rest:
    """What a decode instance is to compute of a prompt, and how."""

    reuse: int
    """Blocks of cached prefix to load there."""
    tokens: int
    """To compute; those of the prefix do not count."""
    chunk: int
    """Of these, at most so many in one step."""
    more_s: float
    """What a step takes longer for that."""
    source: SegmentId | None
    """The segment that the prefix is taken to come from; None if there is none."""
    loaded_bytes: int
    """Size of the prefix."""
    near: SegmentId
    """Where its new blocks are stored: with the prefix, if there is one."""
    ttft_s: float
    """The predicted time to first token."""


@dataclass(frozen=True)
class Beside:
    """A decode instance that might compute a rest beside its running batch."""

    step: StepLine
    rest: PassLine
    """What part of a prompt adds to a step; its chunk is the largest that the instance computes in one."""
    batch: int
    """Sequences in its steps, with all that may join meanwhile: no limit of theirs shall be broken."""
    context: int
    """Tokens whose KV these steps read."""
    tbt_s: float
    """The strictest limit of the time between tokens, the request's own included; infinite if there is none."""
    running: bool
    """Whether there is a batch by now."""
    now_s: float
    """What a step takes with it alone."""

    def more_s(self, tokens: int, prefix: int, chunk: int) -> float:
        """What the longest of the steps takes longer: the last that is full."""
        part = min(chunk, tokens)
        return self.rest.at(part, prefix + tokens - part)

    def chunk_of(self, tokens: int, prefix: int) -> int | None:
        """The largest chunk whose every step keeps the limit; None if not even CHUNK_MIN does.

        Each step is taken to have one more sequence, like this request: another, which nobody knows of yet, may
        join meanwhile. What the instance can is halved, not this rest: so a longer one never has fewer steps."""
        chunk, step_s = self.rest.chunk, self.step.at(self.batch + 1, self.context + prefix + tokens)
        while step_s + self.more_s(tokens, prefix, chunk) > self.tbt_s:
            chunk //= 2
            if chunk < CHUNK_MIN:
                return None
        return chunk

    def seconds(self, tokens: int, prefix: int, chunk: int) -> float:
        """Until the first token. If there is a batch a step is under way, of which half is left on average."""
        steps = -(-tokens // chunk) + (0.5 if self.running else 0.0)
        return steps * self.now_s + self.rest._replace(chunk=chunk).at(tokens, prefix)


def rest_on_decode(
    scene: Scene, prompt: Prompt, found: Found, plan: Placement, decode: Instance, limits: Limits, steps_max: int
) -> Rest | None:
    """What `decode` is to compute of this prompt, in at most `steps_max` steps; None if it goes through prefill.

    One rest at a time: two in one step were not foretold. And none beside requests that the ledger does not know,
    since nobody here knows their limits.
    """
    line = scene.estimates.rest(decode.kind)
    if line is None or decode.computes_rest or decode.foreign:
        return None
    layout = scene.view.manifest.layout
    reuse = min(found.reach, prompt.reusable) if found.held else 0
    source = longest_two(found.held, scene.view.sending)[0] if reuse else None
    loaded_bytes = reuse * layout.block_bytes
    load_s = 0.0 if source is None else _moved_s(scene, source, loaded_bytes)
    whole_bytes = -(-prompt.tokens // layout.block_tokens) * layout.block_bytes
    trip_s = plan.ttft_s + _moved_s(scene, plan.near, whole_bytes)
    there = _beside(scene, decode, line, limits, trip_s)
    prefix = reuse * layout.block_tokens
    tokens = prompt.tokens - prefix
    chunk = there.chunk_of(tokens, prefix)
    if chunk is None or tokens > steps_max * chunk:
        return None
    ttft_s = load_s + there.seconds(tokens, prefix, chunk)
    if ttft_s >= trip_s:
        return None
    more_s = there.more_s(tokens, prefix, chunk)
    return Rest(reuse, tokens, chunk, more_s, source, loaded_bytes, source or plan.near, ttft_s)


def _beside(scene: Scene, decode: Instance, line: PassLine, limits: Limits, within_s: float) -> Beside:
    """With all that run there or are expected to join within that time."""
    there, coming = list[Stream](), list[Stream]()
    for stream in decode.streams.values():
        if stream.joined_at is not None or stream.handed_over:
            there.append(stream)
        elif stream.due_at <= scene.now + within_s:
            coming.append(stream)
    both, step = there + coming, scene.estimates.step(decode.kind)
    return Beside(
        step=step,
        rest=line,
        batch=len(both),
        context=_context(both),
        tbt_s=min([limits.tbt_s, *(stream.tbt_s for stream in both)]),
        running=bool(there),
        now_s=step.at(len(there), _context(there)),
    )


def _context(streams: Iterable[Stream]) -> int:
    return sum(stream.context + stream.said for stream in streams)


def _moved_s(scene: Scene, source: SegmentId, bytes_: int) -> float:
    return scene.estimates.transfer_s(source, bytes_, scene.view.sending.get(source, 0))
