"""The series: valid for Prometheus, right after a request of each kind, and never more of them."""

import math
import random
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conductor.ask import Failed, Refusal, Refused
from conductor.metrics import BLOCK_STATES, REASONS, SECONDS, Metrics
from conductor.problem import Outcome
from engine.tokenizer import Tokenizer
from protocol.registry import Load, Pool
from protocol.settings import field_sentences
from tests.conductor.edge import Edge, an_edge
from tests.conductor.scripted import Play

Key = tuple[str, frozenset[tuple[str, str]]]


def series(metrics: Metrics) -> dict[Key, float]:
    """Every sample by name and labels, without the model's name, which all have."""
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return series(metrics)[name, frozenset(labels.items())]


def test_all_series_are_there_from_the_start_and_finite() -> None:
    found = series(Metrics("tiny"))
    assert {name for name, _ in found} >= {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "dango:request_store_wait_time_seconds_count",
        "dango:request_transfer_time_seconds_count",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "dango:requests_total",
        "dango:requests_in_flight",
        "dango:instances_up",
        "dango:blocks",
        "dango:bad_frames_total",
        "dango:ttft_prediction_ratio_bucket",
        "dango:tbt_prediction_ratio_bucket",
        "dango:refusals_total",
        "dango:ejections_total",
        "dango:stale_instances",
        "dango:draining_segments",
        "dango:degraded",
        "dango:kv_event_batches_total",
        "dango:kv_event_batches_failed_total",
        "dango:kv_event_replays_total",
        "dango:kv_event_replays_abandoned_total",
        "dango:kv_event_listeners",
        "dango:kv_event_listeners_refused_total",
        "dango:replacements_denied_total",
        "dango:held_requests",
        "dango:held_tokens",
        "dango:hold_time_seconds_count",
        "dango:pool_load",
    }
    assert all(math.isfinite(number) for number in found.values())


def test_drained_segments_are_counted_while_they_are_there() -> None:
    metrics = Metrics("tiny")
    metrics.set_pool_load(Pool.KVCACHE, "kvcache-0", Load())
    metrics.set_pool_load(Pool.KVCACHE, "kvcache-1", Load(draining=True))
    assert value(metrics, "dango:draining_segments") == 1
    metrics.drop_instance(Pool.KVCACHE, "kvcache-1")
    assert value(metrics, "dango:draining_segments") == 0


def test_two_registries_do_not_meet() -> None:
    one, other = Metrics("tiny"), Metrics("tiny")
    one.placed()
    assert value(one, "dango:placements_total") == 1
    assert value(other, "dango:placements_total") == 0


def test_buckets_reach_from_a_step_to_the_longest_request() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 2560)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("observe_queue", "vllm:request_queue_time_seconds"),
        ("observe_prefill", "vllm:request_prefill_time_seconds"),
        ("observe_store_wait", "dango:request_store_wait_time_seconds"),
        ("observe_transfer", "dango:request_transfer_time_seconds"),
        ("observe_decode", "vllm:request_decode_time_seconds"),
        ("observe_hold", "dango:hold_time_seconds"),
        ("first_token", "vllm:time_to_first_token_seconds"),
        ("next_token", "vllm:inter_token_latency_seconds"),
    ],
)
def test_a_phase_is_one_observation(method: str, name: str) -> None:
    metrics = Metrics("tiny")
    getattr(metrics, method)(0.3)
    assert value(metrics, f"{name}_count") == 1
    assert value(metrics, f"{name}_sum") == pytest.approx(0.3)
    assert value(metrics, f"{name}_bucket", le="0.25") == 0
    assert value(metrics, f"{name}_bucket", le="0.5") == 1


def test_refusals_are_counted_by_reasons_of_a_fixed_list() -> None:
    metrics = Metrics("tiny")
    before = series(metrics).keys()
    for reason in (*REASONS, "tbt", "whatever"):
        metrics.refused(reason)
    counts = {reason: value(metrics, "dango:refusals_total", reason=reason) for reason in REASONS}
    assert counts == dict.fromkeys(REASONS, 1.0) | {"tbt": 2.0, "other": 2.0}
    assert series(metrics).keys() == before


def test_every_reason_that_a_refusal_may_have_is_counted() -> None:
    sentence = field_sentences(Refusal)["reason"]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(REASONS) - {"other"}


def test_who_is_held_and_how_full_the_pools_are() -> None:
    metrics = Metrics("tiny")
    metrics.set_held(3, 4000)
    metrics.judged(Pool.DECODE, 0.9)
    assert (value(metrics, "dango:held_requests"), value(metrics, "dango:held_tokens")) == (3, 4000)
    assert value(metrics, "dango:pool_load", pool="decode") == 0.9
    assert value(metrics, "dango:pool_load", pool="prefill") == 0


def test_only_finished_requests_have_a_latency() -> None:
    metrics = Metrics("tiny")
    for outcome in Outcome:
        metrics.arrived()
        metrics.left(outcome, 1.0)
        assert value(metrics, "dango:requests_total", outcome=outcome.value) == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(metrics, "dango:requests_in_flight") == 0


def test_a_pool_is_the_sum_of_its_instances() -> None:
    metrics = Metrics("tiny")
    load = Load(running=2, waiting=1, blocks_total=10, blocks_free=4, blocks_leased=3, blocks_pending=1)
    for name in ("decode-0", "decode-1"):
        metrics.set_pool_load(Pool.DECODE, name, load)
    metrics.set_pool_load(Pool.PREFILL, "prefill-0", Load(running=1))
    assert value(metrics, "vllm:num_requests_running") == 5
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "dango:instances_up", pool="decode") == 2
    blocks = [value(metrics, "dango:blocks", pool="decode", state=state) for state in BLOCK_STATES]
    assert dict(zip(BLOCK_STATES, blocks, strict=True)) == {"used": 4, "free": 8, "leased": 6, "pending": 2}
    metrics.drop_instance(Pool.DECODE, "decode-0")
    metrics.drop_instance(Pool.DECODE, "decode-0")
    assert value(metrics, "dango:instances_up", pool="decode") == 1
    assert value(metrics, "vllm:num_requests_running") == 3


def test_counts_of_instances_grow_through_their_restarts() -> None:
    metrics = Metrics("tiny")
    for evicted in (5, 8, 8):
        metrics.set_pool_load(Pool.KVCACHE, "kvcache-0", Load(evicted=evicted, bad_frames=1))
        metrics.set_pool_load(Pool.DECODE, "decode-0", Load(steps=10 * evicted))
    metrics.drop_instance(Pool.KVCACHE, "kvcache-0")
    metrics.set_pool_load(Pool.KVCACHE, "kvcache-0", Load(evicted=8, bad_frames=1))  # it was only out of sight
    assert value(metrics, "dango:evicted_blocks_total") == 8
    metrics.set_pool_load(Pool.KVCACHE, "kvcache-0", Load(evicted=2))  # a new life
    metrics.bad_frames(3)
    assert value(metrics, "dango:evicted_blocks_total") == 10
    assert value(metrics, "dango:bad_frames_total") == 4
    assert value(metrics, "dango:steps_total", pool="decode") == 80
    assert value(metrics, "dango:steps_total", pool="prefill") == 0


def test_kv_events_are_counted_through_restarts_and_listeners_as_they_are() -> None:
    metrics = Metrics("tiny")
    before = Load(events=5, events_failed=1, replays=3, replays_abandoned=2, listeners=4, listeners_refused=6)
    after = Load(events=2, events_failed=1, replays=1, replays_abandoned=0, listeners=1, listeners_refused=1)
    for load in (before, before, after):
        metrics.set_pool_load(Pool.KVCACHE, "kvcache-0", load)
    told = {
        "batches_total": 7,
        "batches_failed_total": 1,
        "replays_total": 4,
        "replays_abandoned_total": 2,
        "listeners": 1,
        "listeners_refused_total": 7,
    }
    assert {name: value(metrics, f"dango:kv_event_{name}") for name in told} == told
    metrics.drop_instance(Pool.KVCACHE, "kvcache-0")
    assert value(metrics, "dango:kv_event_listeners") == 0


def test_tenants_are_counted_not_named() -> None:
    metrics = Metrics("tiny")
    metrics.set_pool_load(Pool.KVCACHE, "kvcache-0", Load(tenants=3, largest_tenant=40, over_quota=2))
    metrics.set_pool_load(Pool.KVCACHE, "kvcache-1", Load())
    assert value(metrics, "dango:tenants") == 3
    assert value(metrics, "dango:largest_tenant_blocks") == 40
    assert value(metrics, "dango:quota_refusals_total") == 2


async def test_a_finished_request_is_counted_once_everywhere(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, Play(reused=1)) as edge:
        _, answer = await edge.complete(prompt=["one", "two"], n=2, max_tokens=3)
        metrics = edge.metrics
    assert value(metrics, "dango:requests_total", outcome="finished") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 4
    assert value(metrics, "vllm:generation_tokens_total") == 12
    assert value(metrics, "vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 2
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 8
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "after", "outcome"),
    [
        (Refused(Refusal("no_decode", "none", 1.0)), 0, "refused"),
        (Failed("died"), 0, "failed"),
        (Failed("died"), 2, "failed"),
        (KeyError("x"), 0, "failed"),
        (KeyError("x"), 2, "failed"),
    ],
)
async def test_every_other_end_has_its_outcome(
    tokenizer: Tokenizer, error: Exception, after: int, outcome: str, stream: bool
) -> None:
    async with an_edge(tokenizer, Play(error=error, error_after=after)) as edge:
        body = {"prompt": "x", "stream": stream}
        async with edge.http.post(edge.url + "/v1/completions", json=body) as response:
            await response.read()
        await edge.complete(temperature=-1)
        found = series(edge.metrics)
    ended = {
        dict(labels)["outcome"]: number
        for (name, labels), number in found.items()
        if name == "dango:requests_total"
    }
    assert found["dango:refusals_total", frozenset({("reason", "no_decode")})] == (outcome == "refused")
    assert ended == dict.fromkeys((one.value for one in Outcome), 0.0) | {outcome: 1.0, "invalid": 1.0}


async def test_clients_cannot_make_series(tokenizer: Tokenizer) -> None:
    """B58"""
    dice = random.Random(58)
    async with an_edge(tokenizer) as edge:
        for _ in range(5):
            await _odd_request(edge, dice)
        before = series(edge.metrics).keys()
        for _ in range(200):
            await _odd_request(edge, dice)
        assert series(edge.metrics).keys() == before


async def _odd_request(edge: Edge, dice: random.Random) -> None:
    name = f"x{dice.getrandbits(32)}"
    await edge.chat(model=dice.choice(["tiny", name]), user=name, cache_salt=name, max_tokens=1, **{name: 1})
    async with edge.http.request(dice.choice(["GET", "PUT", name.upper()]), f"{edge.url}/{name}") as response:
        assert response.status in (400, 404, 405)


async def test_the_endpoint_speaks_prometheus(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge, edge.http.get(edge.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        names = {family.name for family in text_string_to_metric_families(await response.text())}
    assert "vllm:time_to_first_token_seconds" in names


def test_how_good_predictions_were_is_told_as_a_ratio() -> None:
    metrics = Metrics("tiny")
    metrics.predicted_ttft(1.5)
    metrics.predicted_tbt(0.5)
    assert value(metrics, "dango:ttft_prediction_ratio_sum") == 1.5
    assert value(metrics, "dango:ttft_prediction_ratio_bucket", le="1.25") == 0
    assert value(metrics, "dango:tbt_prediction_ratio_bucket", le="0.5") == 1
