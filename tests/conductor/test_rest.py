"""Whether a decode instance computes the rest of a prompt: sooner, within every limit, and never for more load."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.ask import NO_LIMITS, Limits
from conductor.estimate import Estimates, PassLine, StepLine
from conductor.place import Placement, Prompt, Scene
from conductor.rest import CHUNK_MIN, Rest, rest_on_decode
from conductor.view import Instance, Stream, View
from kvcache_pool.api import Found
from protocol.ids import RequestId, SegmentId
from protocol.registry import Load
from tests.conductor.test_place import no_dice
from tests.conductor.test_view import a_view, the
from tests.fakes import LAYOUT

NOW = 100.0
STEP = StepLine(base_s=0.02, row_s=0.001, token_s=1e-5)
REST = PassLine(base_s=0.01, token_s=0.001, pair_s=0.0, chunk=64)
PROMPT = Prompt(tokens=60, reusable=14)
FOUND = Found(10, {"kvcache-1": 10})
"""So 20 of its tokens are left."""
OWN_S = STEP.at(1, PROMPT.tokens)
"""Of a step with nothing else than the request, or one like it."""
REST_S = 0.01 + 20 * 0.001
ALONE_S = 0.02 + REST_S
"""Until the first token, where nothing runs."""


@dataclass
class Rates(Estimates):
    """Times that a test can add up in its head."""

    line: PassLine | None = REST
    block_s: float = 0.0
    """To move a block."""

    def rest(self, kind: str) -> PassLine | None:
        return self.line

    def step(self, kind: str) -> StepLine:
        return STEP

    def transfer_s(self, source: SegmentId, bytes_: int, in_flight: int = 0) -> float:
        return (bytes_ + in_flight) / LAYOUT.block_bytes * self.block_s


def running(context: int = 0, tbt_s: float = math.inf, **more: float) -> Stream:
    return Stream(context, NOW, joined_at=NOW, tbt_s=tbt_s, **more)  # type: ignore[arg-type]


def a_pool(*streams: Stream) -> tuple[View, Instance]:
    view = a_view("kvcache-0", "kvcache-1", "prefill-0", "decode-0")
    for number, stream in enumerate(streams):
        view.enter(the(view, "decode-0"), (RequestId(f"r{number}"), 0), stream)
    return view, the(view, "decode-0")


def decided(
    streams: Sequence[Stream] = (),
    *,
    rates: Rates | None = None,
    trip_s: float = 9.0,
    limits: Limits = NO_LIMITS,
    prompt: Prompt = PROMPT,
    found: Found = FOUND,
    steps_max: int = 4,
) -> Rest | None:
    view, decode = a_pool(*streams)
    prefill, near = the(view, "prefill-0"), SegmentId("kvcache-0")
    plan = Placement(prefill, 0, 0, None, 0, near, queue_s=0.0, work_s=trip_s, ttft_s=trip_s)
    scene = Scene(view, rates or Rates(), NOW, no_dice)
    return rest_on_decode(scene, prompt, found, plan, decode, limits, steps_max)


def test_a_short_rest_is_computed_where_it_is_sooner_there():
    rest = decided()
    assert rest is not None
    assert (rest.reuse, rest.tokens, rest.chunk) == (10, 20, 64)
    assert (rest.source, rest.near, rest.loaded_bytes) == ("kvcache-1", "kvcache-1", 10 * LAYOUT.block_bytes)
    assert rest.ttft_s == pytest.approx(ALONE_S)
    assert rest.more_s == pytest.approx(REST_S)
    assert decided(trip_s=rest.ttft_s) is None


def test_beside_a_batch_it_waits_for_half_a_step_and_has_as_many_steps_as_chunks():
    others_s = STEP.at(2, 150)
    streams = [running(100), running(40, said=10)]
    one, three = decided(streams), decided(streams, prompt=Prompt(40 + 2 * 64 + 1, 10))
    assert one is not None
    assert three is not None
    assert one.ttft_s == pytest.approx(1.5 * others_s + REST_S)
    assert three.ttft_s == pytest.approx(3.5 * others_s + 3 * 0.01 + (2 * 64 + 1) * 0.001)
    assert three.more_s == pytest.approx(0.01 + 64 * 0.001)


def test_a_prompt_of_which_nothing_is_cached_is_a_rest_too():
    rest = decided(found=Found(0, {}))
    assert rest is not None
    assert (rest.reuse, rest.tokens, rest.source, rest.near) == (0, 60, None, "kvcache-0")


def test_the_last_token_is_computed_however_much_is_cached():
    rest = decided(found=Found(15, {"kvcache-0": 15}))
    assert rest is not None
    assert (rest.reuse, rest.tokens) == (14, 4)


def test_loading_the_prefix_counts_and_so_does_the_transfer_that_is_saved():
    rates = Rates(block_s=0.01)
    rest = decided(rates=rates)
    assert rest is not None
    assert rest.ttft_s == pytest.approx(10 * 0.01 + ALONE_S)
    saved_s = 15 * 0.01
    assert decided(rates=rates, trip_s=rest.ttft_s - saved_s - 0.001) is None
    assert decided(rates=rates, trip_s=rest.ttft_s - saved_s + 0.001) is not None


def test_no_step_with_a_chunk_is_longer_than_the_strictest_limit_there_or_the_requests_own():
    step_s = STEP.at(2, PROMPT.tokens + 1000)
    whole = decided([running(1000, tbt_s=step_s + REST_S + 0.001)])
    halved = decided([running(1000, tbt_s=step_s + REST_S - 0.001)])
    assert whole is not None
    assert halved is not None
    assert (whole.chunk, halved.chunk) == (64, 16)
    assert decided([running(1000, tbt_s=step_s + 0.01 + CHUNK_MIN * 0.001 - 0.001)]) is None
    assert decided(limits=Limits(math.inf, OWN_S + 0.01)) is None


def test_more_steps_than_are_allowed_are_no_short_rest():
    prompt = Prompt(tokens=40 + 4 * 64, reusable=14)
    assert decided(prompt=prompt) is not None
    assert decided(prompt=replace(prompt, tokens=prompt.tokens + 1)) is None
    assert decided(prompt=replace(prompt, tokens=prompt.tokens + 1), steps_max=5) is not None
    assert decided(steps_max=0) is None


def test_nothing_is_decided_from_times_that_nobody_measured():
    assert decided(rates=Rates(line=None)) is None


def test_one_rest_at_a_time():
    assert decided([running(rest_s=0.01)]) is None
    assert decided([running(rest_s=0.01, said=1)]) is not None, "that one is over"


def test_no_rest_beside_requests_whose_limits_nobody_here_knows():
    view, decode = a_pool()
    plan = Placement(the(view, "prefill-0"), 0, 0, None, 0, SegmentId("kvcache-0"), 0.0, 9.0, 9.0)
    for others, computed in ((0, True), (1, False)):
        assert view.report(decode.name, decode.incarnation, Load(running=others), NOW)
        scene = Scene(view, Rates(), NOW, no_dice)
        assert (rest_on_decode(scene, PROMPT, FOUND, plan, decode, NO_LIMITS, 4) is not None) == computed


def test_who_is_still_on_the_way_makes_no_step_longer_yet():
    rest = decided([Stream(1000, NOW + 0.1)])
    assert rest is not None
    assert rest.ttft_s == pytest.approx(ALONE_S)


@pytest.mark.parametrize(("context", "more_s"), [(0, STEP.row_s), (500, STEP.row_s + 500 * STEP.token_s)])
def test_but_a_step_with_all_who_are_on_the_way_keeps_the_limit_too(context: int, more_s: float):
    coming, bare_s = Stream(context, NOW + 0.1), OWN_S + REST_S
    for limit_s, chunk in ((bare_s + more_s + 1e-4, 64), (bare_s + more_s - 1e-4, 16)):
        rest = decided([coming], limits=Limits(math.inf, limit_s))
        assert rest is not None
        assert rest.chunk == chunk


def test_who_joins_only_after_the_rest_does_not_count():
    strict = OWN_S / 2
    assert decided([Stream(10, NOW + 1.0, tbt_s=strict)], trip_s=0.9) is not None
    assert decided([Stream(10, NOW + 1.0, tbt_s=strict)], trip_s=1.1) is None
    assert decided([Stream(10, NOW + 1.0, tbt_s=strict, handed_over=True)], trip_s=0.9) is None


STREAMS = st.lists(
    st.builds(
        Stream,
        st.integers(0, 3000),
        st.floats(NOW - 1, NOW + 2),
        joined_at=st.sampled_from([None, NOW]),
        said=st.integers(0, 50),
        tbt_s=st.sampled_from([0.05, 0.1, 0.2, math.inf]),
    ),
    max_size=5,
)
LIMITS = st.builds(Limits, st.just(math.inf), st.sampled_from([0.04, 0.06, 0.1, 0.2, math.inf]))
LINES = st.builds(PassLine, st.floats(0, 0.05), st.floats(0, 0.01), st.floats(0, 1e-4), st.integers(1, 100))


@given(STREAMS, STREAMS, LIMITS, LINES, st.floats(0, 1), st.integers(0, 9))
def test_more_streams_never_turn_a_no_into_a_yes(
    there: list[Stream], more: list[Stream], limits: Limits, line: PassLine, trip_s: float, steps_max: int
):
    before = decided(there, rates=Rates(line), limits=limits, trip_s=trip_s, steps_max=steps_max)
    after = decided([*there, *more], rates=Rates(line), limits=limits, trip_s=trip_s, steps_max=steps_max)
    assert after is None or (before is not None and before.ttft_s <= after.ttft_s + 1e-9)


@given(STREAMS, LIMITS, LINES, st.floats(0, 1), st.floats(0, 1))
def test_stricter_limits_never_turn_a_no_into_a_yes(
    there: list[Stream], limits: Limits, line: PassLine, trip_s: float, share: float
):
    stricter = [replace(stream, tbt_s=stream.tbt_s * share if share else 0.0) for stream in there]
    before = decided(there, rates=Rates(line), limits=limits, trip_s=trip_s)
    for after in (
        decided(stricter, rates=Rates(line), limits=limits, trip_s=trip_s),
        decided(there, rates=Rates(line), limits=replace(limits, tbt_s=share / 5), trip_s=trip_s)
        if share / 5 <= limits.tbt_s
        else None,
    ):
        assert after is None or (before is not None and before.ttft_s <= after.ttft_s + 1e-9)


@given(STREAMS, LIMITS, LINES, st.floats(0, 1), st.integers(41, 300), st.integers(1, 100))
def test_a_longer_rest_never_turns_a_no_into_a_yes(
    there: list[Stream], limits: Limits, line: PassLine, trip_s: float, tokens: int, more: int
):
    """The same prefix, and a trip that takes equally long."""
    shorter, longer = (
        decided(there, rates=Rates(line), limits=limits, trip_s=trip_s, prompt=Prompt(count, 10))
        for count in (tokens, tokens + more)
    )
    assert longer is None or (shorter is not None and shorter.ttft_s <= longer.ttft_s + 1e-9)


@given(STREAMS, LIMITS, LINES, st.floats(0, 1))
def test_a_rest_is_always_sooner_and_within_every_limit(
    there: list[Stream], limits: Limits, line: PassLine, trip_s: float
):
    rest = decided(there, rates=Rates(line), limits=limits, trip_s=trip_s)
    if rest is None:
        return
    assert rest.ttft_s < trip_s
    joined = [stream for stream in there if stream.joined_at is not None]
    context = sum(stream.context + stream.said for stream in joined)
    longest_s = STEP.at(len(joined), context) + rest.more_s
    assert longest_s <= min([limits.tbt_s, *(stream.tbt_s for stream in joined)])
