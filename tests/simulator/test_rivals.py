"""The rival's steps, queues, cache and room on cases computed by hand; the search; the experiment's verdicts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cost import MODELS, CostModel, PassCost, StepCost
from simulator.experiments import rivals
from simulator.record import Outcome
from simulator.rivals.colocated import Colocated, pairs_of, simulate_colocated
from simulator.rivals.search import Points, bracket, capacity, searched
from simulator.workload import BLOCK_TOKENS, Arrival

BLOCK = BLOCK_TOKENS

COST = CostModel(
    "by hand",
    layers=1,
    kv_bytes_token=1,
    prefill=PassCost(base_s=1.0, token_s=0.01, pair_s=0.0),
    step=StepCost(base_s=3.0, row_s=0.5, token_s=0.001),
    host_bytes_s=1.0,
    network_bytes_s=1.0,
    pages_tokens=10_000,
)
"""Launches take 1 s, the weights 2 s, a row 0.5 s, a token of context 1 ms, a token of a prompt 10 ms."""


def a_rival(**given: Any) -> Colocated:
    fields: dict[str, Any] = {"instances": 1, "budget": 100, "overlap": True, "segment_tokens": 8 * BLOCK} | given
    return Colocated(COST, **fields)


def an_arrival(at_s: float = 0.0, tokens: int = 100, output: int = 1, blocks: list[int] | None = None) -> Arrival:
    own = range(round(1000 * at_s) + 1000 * tokens, 10**9)
    return Arrival(at_s, tokens, output, blocks or list(own[: -(-tokens // BLOCK)]))


# -- a step ---------------------------------------------------------------------------------------


def test_a_step_of_one_kind_is_what_the_cost_model_says() -> None:
    rival = a_rival()
    assert rival.step_s(4, 2000, 0, 0) == COST.step_s(4, 2000) == 7.0
    assert rival.step_s(0, 0, 1000, 0) == COST.prefill_s(1000, 0) == 11.0
    real = dataclasses.replace(rival, cost=MODELS["llama3-70b-a800"])
    assert real.step_s(0, 0, 4096, pairs_of(4096, 8192)) == pytest.approx(real.cost.prefill_s(4096, 8192))


@pytest.mark.parametrize(
    ("overlap", "tokens", "seconds"),
    [
        (True, 96, 1 + 2 + 2 + 2),  # launch, rows, weights and KV: the products of 100 tokens (1 s) hide
        (True, 796, 1 + 2 + 8),  # launch, rows, products: weights and KV (4 s) hide
        (False, 96, 1 + 2 + 2 + 2),  # launch, rows, weights, KV
        (False, 796, 1 + 2 + 8 + 2),  # launch, rows, products, KV: the weights hide
    ],
)
def test_a_step_of_both_launches_once_and_reads_the_weights_once(
    overlap: bool, tokens: int, seconds: float
) -> None:
    assert a_rival(overlap=overlap).step_s(4, 2000, tokens, 0) == pytest.approx(seconds)


@given(st.integers(0, 200), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 10**5))
def test_overlap_never_costs_and_more_work_never_takes_less(
    rows: int, context: int, tokens: int, prefix: int
) -> None:
    cost = MODELS["llama3-70b-a800"]
    both = Colocated(cost, 1, 512, overlap=True, segment_tokens=0)
    summed = dataclasses.replace(both, overlap=False)
    pairs = pairs_of(tokens, prefix)
    assert both.step_s(rows, context, tokens, pairs) <= summed.step_s(rows, context, tokens, pairs) + 1e-12
    for rival in (both, summed):
        least = rival.step_s(rows, context, tokens, pairs)
        assert least >= cost.step_s(rows, context) - 1e-12
        assert rival.step_s(rows + 1, context, tokens, pairs) >= least
        assert rival.step_s(rows, context + 1, tokens, pairs) >= least
        assert rival.step_s(rows, context, tokens + 1, pairs_of(tokens + 1, prefix)) >= least - 1e-12


# -- an instance ----------------------------------------------------------------------------------


def test_a_prompt_alone_is_computed_in_chunks_and_then_decoded() -> None:
    """250 tokens are chunks of 100, 100 and 50, 3 s each: the weights take longer than the products."""
    (one,) = simulate_colocated(a_rival(), [an_arrival(tokens=250, output=3)])
    assert one.ttft_s == pytest.approx(9.0)
    steps = [COST.step_s(1, 251), COST.step_s(1, 252)]
    assert one.end_s == pytest.approx(9.0 + sum(steps))
    assert one.tpot_s == pytest.approx(sum(steps) / 2)
    assert one.tbt_s == pytest.approx(steps[1])
    assert one.prefill_s == pytest.approx(2.5)
    assert (one.output, one.finished) == (3, True)


def test_decode_rows_come_first_and_the_oldest_prompts_share_the_rest() -> None:
    """Step 1: the first prompt. Step 2: its row, and 99 tokens of the second. Step 3: the row, 51 of the second,
    48 of the third. Step 4: the row, the last 2 of the third. Step 5: the row of the third."""
    arrivals = [
        an_arrival(tokens=100, output=4),
        an_arrival(1.0, tokens=150),
        an_arrival(1.5, tokens=50, output=2),
    ]
    first, second, third = simulate_colocated(a_rival(), arrivals)
    step = a_rival().step_s
    ends = [3.0]
    for rows, context, tokens in ((1, 101, 99), (1, 102, 99), (1, 103, 2)):
        ends.append(ends[-1] + step(rows, context, tokens, 0))
    assert first.ttft_s == pytest.approx(ends[0])
    assert first.end_s == pytest.approx(ends[3])
    assert second.first_token_s == second.end_s == pytest.approx(ends[2])
    assert third.first_token_s == pytest.approx(ends[3])
    assert third.tbt_s == pytest.approx(COST.step_s(1, 51))


def test_a_prompt_that_comes_during_a_step_is_in_the_next() -> None:
    early, late = simulate_colocated(a_rival(), [an_arrival(tokens=50), an_arrival(0.5, tokens=50)])
    assert (early.end_s, late.end_s) == (3.0, 6.0)
    together = simulate_colocated(a_rival(), [an_arrival(tokens=50), an_arrival(tokens=50, blocks=[7])])
    assert [one.end_s for one in together] == [3.0, 3.0]


def test_a_prompt_waits_for_room_behind_nobody_younger() -> None:
    """The second does not fit beside the first; the third would, and waits all the same."""
    arrivals = [
        an_arrival(tokens=100, output=5000),
        an_arrival(1.0, tokens=6000),
        an_arrival(2.0, tokens=100),
    ]
    first, second, third = simulate_colocated(a_rival(), arrivals)
    assert second.ttft_s > first.end_s - 1.0
    assert third.first_token_s is not None
    assert second.first_token_s is not None
    assert third.first_token_s >= second.first_token_s


def test_a_request_that_could_never_fit_is_refused() -> None:
    (one,) = simulate_colocated(a_rival(), [an_arrival(tokens=9_999, output=2)])
    assert one.refused == "longer than the memory of an instance"


# -- cache and router -----------------------------------------------------------------------------


def test_a_prefix_is_reused_to_the_last_whole_block_and_one_token_is_computed() -> None:
    arrivals = [
        an_arrival(tokens=2 * BLOCK, blocks=[1, 2]),
        an_arrival(100.0, tokens=2 * BLOCK + 9, blocks=[1, 2, 3]),
        an_arrival(200.0, tokens=2 * BLOCK, blocks=[1, 2]),
        an_arrival(300.0, tokens=2 * BLOCK + 9, blocks=[1, 2, 3]),
    ]
    reused = [one.reused for one in simulate_colocated(a_rival(), arrivals)]
    assert reused == [0, 2 * BLOCK, 2 * BLOCK - 1, 2 * BLOCK]


def test_the_end_of_what_was_used_longest_ago_goes_first() -> None:
    room = a_rival(segment_tokens=3 * BLOCK)
    arrivals = [
        an_arrival(tokens=2 * BLOCK, blocks=[1, 2]),
        an_arrival(100.0, tokens=2 * BLOCK, blocks=[3, 4]),
        an_arrival(200.0, tokens=3 * BLOCK, blocks=[1, 2, 5]),
    ]
    assert simulate_colocated(room, arrivals)[-1].reused == BLOCK


@pytest.mark.parametrize(("awaits", "reused"), [(True, 2 * BLOCK), (False, 0)])
def test_what_waits_in_the_queue_can_be_reused_or_not(awaits: bool, reused: int) -> None:
    arrivals = [
        an_arrival(tokens=2 * BLOCK, blocks=[1, 2]),
        an_arrival(1.0, tokens=3 * BLOCK, blocks=[1, 2, 3]),
    ]
    assert simulate_colocated(a_rival(awaits=awaits), arrivals)[-1].reused == reused


def test_the_router_weighs_a_cached_prefix_against_a_queue() -> None:
    """Who has the prefix computes it again nowhere, until its queue is longer than the prompt."""
    prefix = [1, 2, 3, 4]
    warm = an_arrival(tokens=4 * BLOCK, blocks=prefix)
    again = an_arrival(1000.0, tokens=4 * BLOCK + 10, blocks=[*prefix, 5])
    long = an_arrival(1000.0, tokens=7 * BLOCK, blocks=[*range(10, 17)])
    rival = a_rival(instances=2)
    assert simulate_colocated(rival, [warm, again])[-1].reused == 4 * BLOCK
    # Both are idle when the long one comes, so it goes to the first, which is the warm one.
    assert simulate_colocated(rival, [warm, long, again])[-1].reused == 0


def test_prompts_go_where_their_first_token_is_soonest() -> None:
    arrivals = [an_arrival(tokens=100, blocks=[number]) for number in range(4)]
    ends = [one.end_s for one in simulate_colocated(a_rival(instances=2), arrivals)]
    assert sorted(ends) == [3.0, 3.0, 6.0, 6.0]


def test_a_prediction_over_the_bound_is_refused() -> None:
    arrivals = [an_arrival(tokens=100, blocks=[number]) for number in range(4)]
    outcomes = simulate_colocated(a_rival(refuse_s=6.0), arrivals)
    assert [one.refused for one in outcomes] == ["", "", "ttft", "ttft"]


@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 3000), st.integers(1, 40)), max_size=25),
    st.integers(1, 3),
    st.integers(1, 300),
    st.booleans(),
)
def test_every_request_ends_once_in_order_and_equal_runs_are_equal(
    listed: list[tuple[float, int, int]], instances: int, budget: int, awaits: bool
) -> None:
    arrivals = [
        an_arrival(
            at_s,
            tokens,
            output,
            blocks=[number % 3, *range(100 * number + 9, 100 * number + 8 - (-tokens // BLOCK))],
        )
        for number, (at_s, tokens, output) in enumerate(sorted(listed))
    ]
    rival = a_rival(instances=instances, budget=budget, awaits=awaits)
    outcomes = simulate_colocated(rival, arrivals)
    assert [(one.at_s, one.tokens, one.output) for one in outcomes] == [
        (one.at_s, one.tokens, one.output) for one in arrivals
    ]
    for one in outcomes:
        assert one.finished
        assert one.first_token_s is not None
        assert one.at_s < one.first_token_s <= one.end_s  # not at_s + ttft_s, which rounds
        assert one.reused < one.tokens
    assert outcomes == simulate_colocated(rival, arrivals)


def test_a_cluster_without_instances_or_budget_is_refused() -> None:
    for wrong in ({"instances": 0}, {"budget": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            a_rival(**wrong)


# -- the search -----------------------------------------------------------------------------------


def falling(*ends: float) -> Any:
    """Shares of 1 up to some speed, then falling to 0 within 1."""
    return lambda speed: [min(1.0, max(0.0, end + 1 - speed)) for end in ends]


@given(st.floats(0.2, 20), st.floats(0.2, 20), st.floats(0.2, 20))
def test_the_search_finds_each_limit_from_any_guess(one: float, other: float, guess: float) -> None:
    points = searched(falling(one, other), 0.9, guess, stride=1.25, precision=1.05)
    for limit, end in enumerate((one, other)):
        low, high = bracket(points, limit, 0.9)
        assert low <= end + 0.1 <= high <= 1.05 * low * (1 + 1e-9)
        assert low <= capacity(points, limit, 0.9) <= high


def test_a_search_measures_no_speed_twice() -> None:
    seen: list[float] = []

    def measure(speed: float) -> list[float]:
        seen.append(speed)
        return list(falling(2.0, 2.0, 2.0)(speed))

    searched(measure, 0.9, 2.0, stride=1.25, precision=1.05)
    assert len(seen) == len(set(seen)) <= 6


def test_what_no_speed_reaches_and_what_every_speed_does() -> None:
    never = searched(lambda _: [0.5], 0.9, 1.0, stride=2.0, precision=1.1)
    assert (bracket(never, 0, 0.9)[0], capacity(never, 0, 0.9)) == (0.0, 0.0)
    always = searched(lambda _: [1.0], 0.9, 1.0, stride=2.0, precision=1.1)
    assert (bracket(always, 0, 0.9)[1], capacity(always, 0, 0.9)) == (math.inf, 64.0)


def test_a_capacity_lies_on_the_line_between_its_points() -> None:
    points: Points = {2.0: [0.95], 3.0: [0.75], 1.0: [1.0]}
    assert capacity(points, 0, 0.9) == pytest.approx(2.25)


# -- the experiment -------------------------------------------------------------------------------


def a_system(trace: str, kind: str, size: int, *speeds: float) -> dict[str, Any]:
    points = [[speed, 0.9, 0.9, 0.9] for speed in sorted({*speeds})]
    return {"trace": trace, "kind": kind, "size": size, "speeds": list(speeds), "points": points}


def a_report() -> dict[str, Any]:
    front = [a_system("conversation", rivals.OURS, 12, 2.5, 2.5, 2.5)]
    ours = [
        a_system("conversation", rivals.OURS, 12, 2.6, 2.6, 2.6),
        a_system("conversation", rivals.OURS, 13, 2.5, 2.8, 2.8),
    ]
    theirs = [
        a_system("conversation", variant, budget, 2.0 if budget == 256 else 0.0, 2.75, 3.5)
        for variant in rivals.VARIANTS
        for budget in (256, 512)
    ]
    best = [
        rivals.verdict("conversation", place, variant, ours, theirs)
        for place in range(3)
        for variant in rivals.VARIANTS
    ]
    return {
        "nodes": 16,
        "enough": 0.9,
        "ttft_limit_s": 30.0,
        "tbt_limits_s": list(rivals.TBT_LIMITS_S),
        "refuse": False,
        "front": front,
        "systems": ours + theirs,
        "best": best,
    }


def test_the_verdict_names_the_best_of_each_side_and_who_carries_more() -> None:
    best = a_report()["best"]
    told = [(one["prefills"], one["budget"], one["wins"]) for one in best if one["variant"] == "overlap"]
    assert told == [(12, 256, rivals.OURS), (13, 256, "even"), (13, 256, "co-located")]
    assert best[0]["ratio"] == pytest.approx(1.3)


def test_a_rival_that_carries_nothing_has_no_ratio() -> None:
    ours, theirs = [a_system("t", rivals.OURS, 13, 1, 1, 1)], [a_system("t", "overlap", 256, 0, 0, 0)]
    one = rivals.verdict("t", 0, "overlap", ours, theirs)
    assert (one["ratio"], one["wins"]) == (None, rivals.OURS)


def test_splits_close_to_the_best_at_some_limit_are_measured_on_the_whole() -> None:
    systems = [
        a_system("t", rivals.OURS, 8, 1.0, 1.0, 1.0),
        a_system("t", rivals.OURS, 12, 2.0, 2.0, 2.0),
        a_system("t", rivals.OURS, 13, 1.9, 2.1, 2.2),
        a_system("t", rivals.OURS, 14, 0.0, 1.0, 2.1),
    ]
    assert [one["size"] for one in rivals.close(systems)] == [12, 13, 14]
    nothing = [a_system("t", rivals.OURS, 8, 0.0, 0.0, 0.0)]
    assert rivals.close(nothing) == []


def test_shares_count_all_requests() -> None:
    def served(tbt_s: float, ttft_s: float = 1.0, refused: str = "") -> Outcome:
        arrival = an_arrival()
        return Outcome(0.0, 10, 5, arrival.priority, end_s=9.0, first_token_s=ttft_s, tbt_s=tbt_s, refused=refused)

    outcomes = [served(0.05), served(0.15), served(0.25), served(0.05, ttft_s=31.0), served(0.05, refused="ttft")]
    assert rivals.shares(outcomes) == [0.2, 0.4, 0.6]


def test_it_is_told_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = a_report()
    text = rivals.table(report)
    assert "12+4" in text
    assert "(front)" in text
    assert "none" in text
    (picture,) = rivals.draw(report, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
