"""Where should a prompt go? Pure: believes the view, reads no clock, draws no number, touches nothing.

Mooncake's Algorithm 1 (FAST'25, section 6), and the rivals that its Figure 5 holds it against. Each prefill
instance either uses the prefix that its own home holds, or fetches a longer one from another segment:

    ttft_s = transfer_s (what is fetched) + queue_s (what waits there) + prefill_s (the tokens that are left)

and the least wins. Ties go to the instance with fewer prompts placed on it, then to the one that has waited
longest for one, then to the first by name. So new prefixes are dealt over all homes also while every instance is
idle: if one took them all, its home would push out what is in use while others are empty.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from conductor.ask import Refusal
from conductor.estimate import Estimates
from conductor.view import Instance, View
from kvcache_pool.api import Found
from protocol.ids import Incarnation, SegmentId
from protocol.registry import Pool

RETRY_NOBODY_S = 2.0
"""A pool without an instance is usually one that restarts: a supervisor needs a second or two."""

FETCH_FIXED_S = 0.01
"""What a fetch costs besides moving its bytes. About half is the way: a few messages to a segment that is not at
home. The other half is a margin for the memory of the copy, which pushes other blocks out. It is small against a
prefill that is worth a trip, and keeps off copies that save a few milliseconds."""


@dataclass(frozen=True)
class Prompt:
    """What placement needs to know of a request."""

    tokens: int
    reusable: int
    """Blocks of it that may be taken from the cache: all full ones, but the last token is always computed."""
    avoid: Collection[Incarnation] = ()
    """Lives of instances that have failed it."""


@dataclass(frozen=True)
class Scene:
    """What a placement is decided from, besides the prompt."""

    view: View
    estimates: Estimates
    now: float
    dice: Callable[[int], int]
    """dice(n) is one of 0 to n - 1, each equally likely; handed in, since nothing here draws."""
    threshold: float = 0.0
    """Algorithm 1's balancing threshold, the ratio of two prefix lengths; 0 derives it: see `break_even`."""


class Plan(NamedTuple):
    """One prefill instance, and what a prompt would cost there."""

    instance: Instance
    reuse: int
    """Blocks of cached prefix to load."""
    fetched: int
    """Those of them that come from another segment than the instance's home."""
    source: SegmentId | None
    """The segment that they are taken to come from; None if nothing is fetched."""
    transfer_s: float
    queue_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        """The predicted time to first token."""
        return self.transfer_s + self.queue_s + self.prefill_s


@dataclass(frozen=True)
class Placement:
    """Where a request goes."""

    prefill: Instance
    reuse: int
    """Blocks of cached prefix to load."""
    own: int
    """Blocks of them that the prefill instance's home holds already."""
    source: SegmentId | None
    """The segment that the others are taken to come from; None if nothing is fetched."""
    fetched_bytes: int
    """Their size."""
    near: SegmentId
    """The prefill instance's home: where new blocks, and copies of those that are fetched, are stored."""
    queue_s: float
    """Predicted time until the prompt has its turn."""
    work_s: float
    """Predicted time that the prompt then keeps the prefill instance, loading included."""
    ttft_s: float
    """The predicted time to first token."""


Policy = Callable[[Scene, Prompt, Found], Plan]
"""Chooses among the prefill instances, of which there is at least one."""


def global_cache_aware(scene: Scene, prompt: Prompt, found: Found) -> Plan:
    """Algorithm 1: least predicted time to first token, where a longer prefix may come from elsewhere."""
    costs = _Costs(scene, prompt, found)
    return _least_ttft(costs.cheapest(instance) for instance in _able(scene, prompt))


def local_cache_aware(scene: Scene, prompt: Prompt, found: Found) -> Plan:
    """Least predicted time to first token, where an instance uses only what its own home holds."""
    costs = _Costs(scene, prompt, found)
    return _least_ttft(costs.at_home(instance) for instance in _able(scene, prompt))


def load_balance(scene: Scene, prompt: Prompt, found: Found) -> Plan:
    """The shortest queue in seconds. Chosen without a look at the cache; what its home holds is then used."""
    chosen = min(_able(scene, prompt), key=lambda i: (i.queue_s(scene.now), *_among_equals(i)))
    return _Costs(scene, prompt, found).at_home(chosen)


def random(scene: Scene, prompt: Prompt, found: Found) -> Plan:
    """Any instance, each equally likely. Chosen without a look at anything; what its home holds is then used."""
    instances = _able(scene, prompt)
    return _Costs(scene, prompt, found).at_home(instances[scene.dice(len(instances))])


PLACEMENTS: Mapping[str, Policy] = MappingProxyType(
    {policy.__name__: policy for policy in (global_cache_aware, local_cache_aware, load_balance, random)}
)
"""By the names that the configuration knows; the first is the default."""


def placement_named(name: str) -> Policy:
    """The policy of that name. Raises ValueError, which names those that there are."""
    if name not in PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, not {name!r}")
    return PLACEMENTS[name]


def place(scene: Scene, prompt: Prompt, found: Found, name: str) -> Placement | Refusal:
    """Where a prompt goes by the policy `name`, or which pool is missing. Raises ValueError for an unknown one."""
    policy, view = placement_named(name), scene.view
    prefills, decodes = view.of(Pool.PREFILL), view.of(Pool.DECODE)
    missing = view.missing()
    if missing:
        pool = "prefill" if not prefills else "decode" if not decodes else "kvcache"
        return Refusal(f"no_{pool}", "; ".join(missing), RETRY_NOBODY_S)
    plan = policy(scene, prompt, found)
    near = view.home(plan.instance)
    assert near is not None, "there is a kvcache instance"
    return Placement(
        prefill=plan.instance,
        reuse=plan.reuse,
        own=plan.reuse - plan.fetched,
        source=plan.source,
        fetched_bytes=plan.fetched * view.manifest.layout.block_bytes,
        near=near,
        queue_s=plan.queue_s,
        work_s=plan.transfer_s + plan.prefill_s,
        ttft_s=plan.ttft_s,
    )


def break_even(own: int, best: int, saved_s: float, moved_s: float) -> float:
    """The blocks that a prefix elsewhere must exceed to be worth fetching; over `own`, the balancing threshold.

    The papers set the threshold by hand. Here it follows from this prompt and the rates as they are measured now.
    To fetch d = best - own blocks, with best > own, saves `saved_s` of computing (prefill_s after `own` less
    prefill_s after `best`) and takes `moved_s` for the bytes and FETCH_FIXED_S besides. With the net gain of a
    block, gain = (saved_s - moved_s) / d, it pays when

        d * gain > FETCH_FIXED_S    <=>    best > own + FETCH_FIXED_S / gain
                                    <=>    best / own > 1 + FETCH_FIXED_S / (own * gain)  =  the threshold

    A fast network has it just above 1: whatever is longer is fetched. Where moving is no faster than computing
    the gain is not positive and the threshold infinite: nothing is ever fetched. The middle form holds for
    own = 0 too, where both ratios are infinite; so that is the one that is returned and compared.
    """
    gain = (saved_s - moved_s) / (best - own)
    return own + FETCH_FIXED_S / gain if gain > 0 else math.inf


class _Costs:
    """What one prompt costs on each instance. Kept for the length of one decision: instances of one kind whose
    homes hold equally much cost the same but for their queues."""

    def __init__(self, scene: Scene, prompt: Prompt, found: Found) -> None:
        layout = scene.view.manifest.layout
        self._scene = scene
        self._tokens = prompt.tokens
        self._reusable = prompt.reusable
        self._block_tokens = layout.block_tokens
        self._block_bytes = layout.block_bytes
        self._held = found.held
        self._best = min(found.reach, prompt.reusable) if found.held else 0
        self._senders = longest_two(found.held, scene.view.sending)
        self._prefill_s: dict[tuple[str, int], float] = {}
        self._fetch_s: dict[tuple[str, int, SegmentId], float | None] = {}

    def at_home(self, instance: Instance) -> Plan:
        """With what the instance's home holds."""
        return self._plan(instance, self._own(self._scene.view.home(instance)))

    def cheapest(self, instance: Instance) -> Plan:
        """With what its home holds, or with the longest prefix if Algorithm 1 would have that fetched."""
        home = self._scene.view.home(instance)
        own = self._own(home)
        if self._best <= own:
            return self._plan(instance, own)
        first, *second = self._senders
        source = second[0] if second and first == home else first
        key = instance.kind, own, source
        if key not in self._fetch_s:
            self._fetch_s[key] = self._worth(instance, own, source)
        transfer_s = self._fetch_s[key]
        if transfer_s is None:
            return self._plan(instance, own)
        return self._plan(instance, self._best, self._best - own, source, transfer_s)

    def _plan(
        self,
        instance: Instance,
        reuse: int,
        fetched: int = 0,
        source: SegmentId | None = None,
        transfer_s: float = 0.0,
    ) -> Plan:
        queue_s, prefill_s = instance.queue_s(self._scene.now), self._compute_s(instance, reuse)
        return Plan(instance, reuse, fetched, source, transfer_s, queue_s, prefill_s)

    def _worth(self, instance: Instance, own: int, source: SegmentId) -> float | None:
        """How long it takes to fetch what is missing of the best prefix; None if it should not be fetched."""
        threshold, best, in_flight = self._scene.threshold, self._best, self._scene.view.sending.get(source, 0)
        moved_s = self._scene.estimates.transfer_s(source, (best - own) * self._block_bytes, in_flight)
        if threshold:
            least = threshold * own
        else:
            saved_s = self._compute_s(instance, own) - self._compute_s(instance, best)
            least = break_even(own, best, saved_s, moved_s)
        return FETCH_FIXED_S + moved_s if best > least else None

    def _own(self, home: SegmentId | None) -> int:
        return min(self._held.get(home or "", 0), self._reusable)

    def _compute_s(self, instance: Instance, reuse: int) -> float:
        key = instance.kind, reuse
        if key not in self._prefill_s:
            prefix = reuse * self._block_tokens
            self._prefill_s[key] = self._scene.estimates.prefill_s(instance.kind, self._tokens - prefix, prefix)
        return self._prefill_s[key]


def longest_two(held: Mapping[str, int], sending: Mapping[SegmentId, int]) -> list[SegmentId]:
    """The two segments that hold the longest part of a prefix: what is fetched is taken to come from the first, or
    from the second if the first is at home. Of equal ones those that have less to send, then the first by name.

    A prefix may also go on where neither has it; then these stand for the segments that do."""
    segments = [SegmentId(name) for name in held]
    return sorted(segments, key=lambda segment: (-held[segment], sending.get(segment, 0), segment))[:2]


def _able(scene: Scene, prompt: Prompt) -> list[Instance]:
    return scene.view.able(Pool.PREFILL, scene.now, prompt.avoid)


def _least_ttft(plans: Iterable[Plan]) -> Plan:
    return min(plans, key=lambda plan: (plan.ttft_s, *_among_equals(plan.instance)))


def _among_equals(instance: Instance) -> tuple[int, int, str]:
    """What decides between instances of equal cost: the least is taken."""
    return len(instance.prompts), instance.turn, instance.name
