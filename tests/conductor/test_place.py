"""Where a prompt goes, on small views: Algorithm 1, its rivals, what fetching is worth."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.ask import Refusal
from conductor.config import ConductorConfig
from conductor.estimate import Estimates
from conductor.place import (
    FETCH_FIXED_S,
    PLACEMENTS,
    Placement,
    Plan,
    Prompt,
    Scene,
    break_even,
    place,
    placement_named,
)
from conductor.view import Prefilling
from kvcache_pool.api import Found
from protocol.ids import RequestId, SegmentId
from tests.conductor.test_view import a_view, the
from tests.fakes import LAYOUT

ALL = ("kvcache-0", "kvcache-1", "prefill-0", "prefill-1", "decode-0", "decode-1")
PROMPT = Prompt(tokens=40, reusable=9)
NOTHING = Found(0, {})
BLOCK_S = 0.04
"""To compute the four tokens of a block at `Rates.token_s`."""


@dataclass
class Rates(Estimates):
    """Times that a test can add up in its head."""

    token_s: float = 0.01
    """To compute a token; the square term is for those that want one."""
    square_s: float = 0.0
    block_s: float = 0.0
    """To move a block."""
    kinds: dict[str, float] = field(default_factory=dict)
    """How many times longer another kind of instance takes."""
    in_flight: list[tuple[str, int]] = field(default_factory=list)
    """From where what was asked of a transfer, and what was on its way there already."""

    def prefill_s(self, kind: str, tokens: int, prefix: int) -> float:
        flat, square = self.token_s * tokens, self.square_s * tokens * (prefix + tokens / 2)
        return (flat + square) * self.kinds.get(kind, 1.0)

    def step_s(self, kind: str, batch: float, context: float) -> float:
        return (0.02 + 0.001 * batch + 0.0001 * context) * self.kinds.get(kind, 1.0)

    def transfer_s(self, source: SegmentId, bytes_: int, in_flight: int = 0) -> float:
        self.in_flight.append((source, in_flight))
        return (bytes_ + in_flight) / LAYOUT.block_bytes * self.block_s


def no_dice(sides: int) -> int:
    raise AssertionError("this policy does not draw")


def a_scene(
    queued: dict[str, float] | None = None,
    *,
    rates: Rates | None = None,
    threshold: float = 0.0,
    dice: Callable[[int], int] = no_dice,
    names: tuple[str, ...] = ALL,
) -> Scene:
    """Two of everything at time 0; `queued` seconds of work are placed."""
    view = a_view(*names)
    for name, seconds in (queued or {}).items():
        view.enter(the(view, name), (RequestId("earlier"), 0), Prefilling(1, 0, seconds, 0.0))
    return Scene(view, rates or Rates(), 0.0, dice, threshold)


def placed(scene: Scene, found: Found, name: str = "global_cache_aware", prompt: Prompt = PROMPT) -> Placement:
    placement = place(scene, prompt, found, name)
    assert isinstance(placement, Placement)
    return placement


# -- Algorithm 1 ------------------------------------------------------------------------------------


def test_a_warm_instance_wins_only_while_its_queue_is_short():
    found = Found(8, {"kvcache-0": 8, "kvcache-1": 4})
    slow = Rates(block_s=1.0)
    assert placed(a_scene(rates=slow), found).prefill.name == "prefill-0"
    assert placed(a_scene({"prefill-0": 0.1}, rates=slow), found).prefill.name == "prefill-0"
    assert placed(a_scene({"prefill-0": 5.0}, rates=slow), found).prefill.name == "prefill-1"


def test_with_a_threshold_that_is_set_a_prefix_that_many_times_longer_is_fetched():
    busy = {"prefill-0": 100.0}
    much, little = Found(9, {"kvcache-0": 9, "kvcache-1": 4}), Found(8, {"kvcache-0": 8, "kvcache-1": 4})
    assert placed(a_scene(busy, threshold=2.0), much).reuse == 9
    assert placed(a_scene(busy, threshold=2.0), little).reuse == 4
    assert placed(a_scene(busy, threshold=1.9), little).reuse == 8
    assert placed(a_scene(busy, threshold=2.0), Found(8, {"kvcache-0": 8})).reuse == 8


def test_a_placement_tells_what_is_fetched_from_where_and_what_it_costs():
    scene = a_scene({"prefill-0": 100.0, "prefill-1": 3.0}, rates=Rates(block_s=0.001))
    placement = placed(scene, Found(9, {"kvcache-0": 9, "kvcache-1": 4}))
    assert (placement.prefill.name, placement.near) == ("prefill-1", "kvcache-1")
    assert (placement.reuse, placement.own) == (9, 4)
    assert (placement.source, placement.fetched_bytes) == ("kvcache-0", 5 * LAYOUT.block_bytes)
    assert placement.queue_s == 3.0
    assert placement.work_s == pytest.approx(FETCH_FIXED_S + 5 * 0.001 + 4 * 0.01)
    assert placement.ttft_s == pytest.approx(placement.queue_s + placement.work_s)


def test_nothing_fetched_comes_from_nowhere():
    placement = placed(a_scene(), NOTHING)
    assert (placement.reuse, placement.own, placement.source, placement.fetched_bytes) == (0, 0, None, 0)
    assert placement.ttft_s == pytest.approx(0.4)


def test_a_fetch_is_taken_from_the_longest_other_holder_and_of_equal_ones_from_the_least_busy():
    names = (*ALL, "kvcache-2", "kvcache-3")
    scene = a_scene({"prefill-0": 100.0}, rates=Rates(block_s=0.001), names=names)
    held = {"kvcache-0": 7, "kvcache-2": 8, "kvcache-3": 8}
    assert placed(scene, Found(8, held)).source == "kvcache-2"
    scene.view.send(SegmentId("kvcache-2"), 3 * LAYOUT.block_bytes)
    assert placed(scene, Found(8, held)).source == "kvcache-3"
    assert isinstance(scene.estimates, Rates)
    scene.estimates.in_flight.clear()
    assert placed(scene, Found(9, held | {"kvcache-2": 9})).source == "kvcache-2"
    assert ("kvcache-2", 3 * LAYOUT.block_bytes) in scene.estimates.in_flight


def test_a_prefix_that_goes_on_elsewhere_than_at_home_is_fetched_too():
    """Reach may come from several segments together: the first block at home, the later ones elsewhere."""
    scene = a_scene({"prefill-1": 100.0}, rates=Rates(block_s=0.001))
    home_is_longest = placed(scene, Found(9, {"kvcache-0": 5, "kvcache-1": 2}))
    assert (home_is_longest.own, home_is_longest.reuse, home_is_longest.source) == (5, 9, "kvcache-1")
    home_alone = placed(scene, Found(9, {"kvcache-0": 5}))
    assert (home_alone.own, home_alone.reuse, home_alone.source) == (5, 9, "kvcache-0")
    assert placed(scene, Found(9, {})).reuse == 0


def test_the_last_token_is_never_taken_from_the_cache():
    for name in PLACEMENTS:
        scene = a_scene(dice=lambda _: 0)
        assert placed(scene, Found(10, {"kvcache-0": 10}), name).reuse == PROMPT.reusable


def test_the_faster_kind_wins_when_nothing_is_cached():
    scene = a_scene(rates=Rates(kinds={"slow": 4.0}))
    the(scene.view, "prefill-0").kind = "slow"
    assert placed(scene, NOTHING).prefill.name == "prefill-1"


def test_a_busy_sender_makes_waiting_for_the_warm_instance_worth_while():
    found, rates = Found(9, {"kvcache-0": 9}), Rates(block_s=0.001)
    scene = a_scene({"prefill-0": 0.1}, rates=rates)
    assert placed(scene, found).prefill.name == "prefill-1"
    scene.view.send(SegmentId("kvcache-0"), 1000 * LAYOUT.block_bytes)
    assert placed(scene, found).prefill.name == "prefill-0"


@pytest.mark.parametrize("name", ["global_cache_aware", "local_cache_aware", "load_balance"])
def test_ties_go_to_fewer_prompts_then_to_who_waited_longest_then_to_the_first_name(name: str):
    scene, key = a_scene(), (RequestId("free"), 0)
    assert placed(scene, NOTHING, name).prefill.name == "prefill-0"
    scene.view.enter(the(scene.view, "prefill-0"), key, Prefilling(1, 0, 0.0, 0.0))
    assert placed(scene, NOTHING, name).prefill.name == "prefill-1"
    scene.view.release(the(scene.view, "prefill-0"), key, 0.0)
    assert placed(scene, NOTHING, name).prefill.name == "prefill-1"
    scene.view.enter(the(scene.view, "prefill-1"), key, Prefilling(1, 0, 0.0, 0.0))
    scene.view.release(the(scene.view, "prefill-1"), key, 0.0)
    assert placed(scene, NOTHING, name).prefill.name == "prefill-0"


# -- the threshold that adapts ----------------------------------------------------------------------


def test_a_fast_network_has_the_threshold_near_one_and_a_slow_one_infinite():
    own, best = 100, 200
    saved_s = (best - own) * BLOCK_S
    fast = break_even(own, best, saved_s, moved_s=saved_s / 100) / own
    assert 1.0 < fast < 1.01
    slower = break_even(own, best, saved_s, moved_s=saved_s * 0.9) / own
    assert slower > fast
    assert break_even(own, best, saved_s, moved_s=saved_s) == math.inf
    assert break_even(own, best, saved_s, moved_s=saved_s * 2) == math.inf


def test_where_nothing_is_at_home_the_break_even_is_a_length():
    assert break_even(0, 8, saved_s=8 * FETCH_FIXED_S, moved_s=0.0) == pytest.approx(1.0)
    assert break_even(0, 8, saved_s=8 * FETCH_FIXED_S, moved_s=4 * FETCH_FIXED_S) == pytest.approx(2.0)


@pytest.mark.parametrize(("block_s", "reuse"), [(0.001, 9), (0.035, 8), (0.05, 8)])
def test_one_block_more_is_fetched_over_a_fast_network_and_not_over_a_slow_one(block_s: float, reuse: int):
    scene = a_scene({"prefill-0": 100.0}, rates=Rates(block_s=block_s))
    assert placed(scene, Found(9, {"kvcache-0": 9, "kvcache-1": 8})).reuse == reuse


def test_into_an_empty_home_much_is_fetched_or_nothing_as_the_network_goes():
    busy, found = {"prefill-0": 100.0}, Found(9, {"kvcache-0": 9})
    assert placed(a_scene(busy, rates=Rates(block_s=0.035)), found).reuse == 9
    assert placed(a_scene(busy, rates=Rates(block_s=BLOCK_S)), found).reuse == 0


amounts = st.floats(1e-4, 10.0)


@given(st.integers(0, 50), st.integers(1, 50), amounts, amounts)
def test_to_be_above_the_break_even_is_to_save_time(own: int, more: int, saved_s: float, moved_s: float):
    worth = own + more > break_even(own, own + more, saved_s, moved_s)
    spare_s = saved_s - moved_s - FETCH_FIXED_S
    assert worth == (spare_s > 0) or spare_s == pytest.approx(0.0, abs=1e-9)


# -- the rivals -------------------------------------------------------------------------------------


def test_local_cache_aware_never_fetches():
    scene = a_scene({"prefill-0": 0.3})
    found = Found(9, {"kvcache-0": 9})
    assert placed(scene, found).reuse == 9
    local = placed(scene, found, "local_cache_aware")
    assert (local.prefill.name, local.reuse, local.source) == ("prefill-0", 9, None)
    cold = placed(a_scene({"prefill-0": 0.5}), found, "local_cache_aware")
    assert (cold.prefill.name, cold.reuse) == ("prefill-1", 0)


def test_load_balance_looks_at_queues_alone_and_then_uses_what_is_there():
    found = Found(9, {"kvcache-0": 9, "kvcache-1": 2})
    balanced = placed(a_scene({"prefill-0": 0.01}), found, "load_balance")
    assert (balanced.prefill.name, balanced.reuse, balanced.source) == ("prefill-1", 2, None)


def test_random_draws_once_and_then_uses_what_is_there():
    found = Found(9, {"kvcache-0": 9, "kvcache-1": 2})
    sides: list[int] = []
    scene = a_scene({"prefill-1": 100.0}, dice=lambda n: sides.append(n) or 1)  # type: ignore[func-returns-value]
    drawn = placed(scene, found, "random")
    assert (drawn.prefill.name, drawn.reuse, drawn.source) == ("prefill-1", 2, None)
    assert sides == [2]


def test_random_is_as_uniform_as_its_dice():
    names = (*ALL, "prefill-2", "prefill-3")
    fair = a_scene(names=names, dice=random.Random(1).randrange)
    drawn = Counter(placed(fair, NOTHING, "random").prefill.name for _ in range(4000))
    assert set(drawn) == {"prefill-0", "prefill-1", "prefill-2", "prefill-3"}
    assert all(900 < count < 1100 for count in drawn.values())


# -- names and refusals -----------------------------------------------------------------------------


def test_an_unknown_placement_is_refused_by_name():
    with pytest.raises(ValueError, match=r"one of global_cache_aware, local_cache_aware, .*, not 'best'"):
        placement_named("best")
    with pytest.raises(ValueError, match="not 'best'"):
        place(a_scene(), PROMPT, NOTHING, "best")


def test_the_configuration_knows_the_placements_and_its_default_is_the_first():
    assert get_type_hints(ConductorConfig)["placement"].__args__ == tuple(PLACEMENTS)
    assert ConductorConfig().placement == next(iter(PLACEMENTS)) == "global_cache_aware"
    with pytest.raises(ValueError, match="balancing_threshold must be 0 or more"):
        ConductorConfig(balancing_threshold=-1.0)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_an_empty_pool_is_a_refusal_that_names_it(name: str):
    for gone, reason in (("prefill", "no_prefill"), ("decode", "no_decode"), ("kvcache", "no_kvcache")):
        scene = a_scene(names=tuple(other for other in ALL if not other.startswith(gone)))
        refusal = place(scene, PROMPT, NOTHING, name)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.status) == (reason, 503)
        assert gone in refusal.text


# -- what always holds ------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 12), min_size=3, max_size=3)
QUEUES = st.lists(st.floats(0.0, 3.0), min_size=3, max_size=3)
RATES = st.builds(
    Rates, token_s=st.floats(1e-4, 0.1), square_s=st.sampled_from([0.0, 1e-4]), block_s=st.floats(0.0, 0.2)
)


def three(lengths: list[int], queues: list[float], rates: Rates, more: int = 0) -> tuple[Scene, Found]:
    """Three prefill instances with a home each: what is held there and what waits there."""
    names = tuple(f"{pool}-{n}" for pool in ("kvcache", "prefill", "decode") for n in range(3))
    scene = a_scene(
        {f"prefill-{n}": seconds for n, seconds in enumerate(queues)},
        rates=replace(rates, in_flight=[]),
        names=names,
        dice=random.Random(7).randrange,
    )
    held = {f"kvcache-{n}": length for n, length in enumerate(lengths) if length}
    return scene, Found(max(lengths) + (more if held else 0), held)


@given(
    st.sampled_from(list(PLACEMENTS)), LENGTHS, QUEUES, RATES, st.integers(0, 3), st.sampled_from([0.0, 0.5, 2.0])
)
def test_no_policy_reuses_more_than_it_may(
    name: str, lengths: list[int], queues: list[float], rates: Rates, more: int, threshold: float
):
    scene, found = three(lengths, queues, rates, more)
    plan: Plan = PLACEMENTS[name](replace(scene, threshold=threshold), PROMPT, found)
    assert 0 <= plan.fetched <= plan.reuse <= min(PROMPT.reusable, found.reach)
    assert (plan.source is None) == (plan.fetched == 0)
    assert plan.ttft_s >= plan.queue_s >= 0


@given(st.sampled_from(list(PLACEMENTS)), LENGTHS, QUEUES, RATES)
def test_equal_scenes_get_equal_placements(name: str, lengths: list[int], queues: list[float], rates: Rates):
    one, other = (placed(*three(lengths, queues, rates), name) for _ in range(2))
    assert one == other


@given(
    st.sampled_from(["global_cache_aware", "local_cache_aware", "load_balance"]),
    LENGTHS,
    QUEUES,
    RATES,
    st.integers(0, 2),
    st.floats(0.0, 3.0),
)
def test_a_longer_queue_never_makes_an_instance_more_attractive(
    name: str, lengths: list[int], queues: list[float], rates: Rates, which: int, extra_s: float
):
    scene, found = three(lengths, queues, rates)
    before = placed(scene, found, name)
    instance = the(scene.view, f"prefill-{which}")
    scene.view.enter(instance, (RequestId("one more"), 0), Prefilling(1, 0, extra_s, 0.0))
    after = placed(scene, found, name)
    assert after.prefill is before.prefill or after.prefill is not instance
    assert after.ttft_s >= before.ttft_s - 1e-9 or name == "load_balance"


@given(LENGTHS, QUEUES, RATES, st.integers(0, 2), st.integers(1, 6))
def test_more_of_a_prefix_in_the_cache_never_raises_the_predicted_time(
    lengths: list[int], queues: list[float], rates: Rates, which: int, more: int
):
    before = placed(*three(lengths, queues, rates))
    grown = [length + more * (n == which) for n, length in enumerate(lengths)]
    assert placed(*three(grown, queues, rates)).ttft_s <= before.ttft_s + 1e-9
