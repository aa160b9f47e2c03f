"""What operators see: vLLM's metric names where the meaning is the same, `dango:` for the rest.

Labels come from fixed lists only: the served model's name, pools, states, outcomes. Nothing that a client
sends becomes a label, so the number of series is constant.
"""

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from conductor.problem import Outcome
from engine.api import EndReason
from protocol.registry import Load, Pool

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
    320,
    640,
    1280,
    2560,
)
"""From one step of a small model on a GPU to the longest request on a CPU."""

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4, 10)
"""Of a real time to a predicted one: fine where predictions are good, wide enough to see how bad others are."""

REASONS = (
    *("no_prefill", "no_decode", "no_kvcache", "pool_full", "quota", "queue_full", "draining", "ttft", "tbt"),
    "other",
)
"""Reasons of refusals, as `Refusal.reason` has them, and one for what is not among them."""

BLOCK_STATES = ("used", "free", "leased", "pending")

IDLE = Load()
"""Of an instance that has not reported yet."""

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """The Conductor's registry of counters. Owns all series; any method may be called at any time."""

    def __init__(self, model: str) -> None:
        # Twice the series, for times that Prometheus does not need.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model = model
        self._loads: dict[tuple[Pool, str], Load] = {}
        self._counted: dict[tuple[Pool, str], Load] = {}  # outlives an instance: it may come back
        self._make_latencies()
        self._make_counts()
        self._make_gauges()

    def render(self) -> bytes:
        """Everything in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self.registry)

    # --- a request, as the gateway sees it

    def arrived(self) -> None:
        """A request's headers have been read. `left` must follow."""
        self._in_flight.inc()

    def left(self, outcome: Outcome, seconds: float) -> None:
        """The request has ended, so many seconds after it arrived."""
        self._in_flight.dec()
        self._requests[outcome].inc()
        if outcome is Outcome.FINISHED:
            self._e2e.observe(seconds)

    def prompt(self, tokens: int, reused_tokens: int) -> None:
        """A prompt's KV is there; so many of its tokens were not computed anew."""
        self._prompt_tokens.inc(tokens)
        self._prompt_lengths.observe(tokens)
        self._cached_tokens.inc(reused_tokens)

    def first_token(self, seconds: float) -> None:
        """The first token of a request went out, counted from its arrival."""
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A later token of a choice went out, counted from the one before."""
        self._tbt.observe(seconds)

    def generated(self, tokens: int = 1) -> None:
        """Tokens came from the pools."""
        self._generation_tokens.inc(tokens)

    def choice_ended(self, reason: EndReason, tokens: int) -> None:
        """A choice is complete."""
        self._success[reason].inc()
        self._output_lengths.observe(tokens)

    # --- a request's phases, as the dispatcher sees them

    def observe_queue(self, seconds: float) -> None:
        """Accepted, and waiting in an instance's queue."""
        self._queue.observe(seconds)

    def observe_prefill(self, seconds: float) -> None:
        """Computing the prompt, loading its cached prefix included."""
        self._prefill.observe(seconds)

    def observe_store_wait(self, seconds: float) -> None:
        """Storing after the last layer was computed: what of it the request had to wait for."""
        self._store_wait.observe(seconds)

    def observe_transfer(self, seconds: float) -> None:
        """From the first token to the moment when the decode instance had the KV."""
        self._transfer.observe(seconds)

    def observe_decode(self, seconds: float) -> None:
        """From the first token to the last."""
        self._decode.observe(seconds)

    def placed(self) -> None:
        """A prompt was given its instances."""
        self._placed.inc()

    def replaced(self) -> None:
        """A prompt was placed again, since an instance failed it."""
        self._replaced.inc()

    def rest_on_decode(self) -> None:
        """A decode instance computed the rest of a prompt, without a prefill."""
        self._rests.inc()

    def not_replaced(self) -> None:
        """A prompt that an instance failed was not placed again: too many have been."""
        self._not_replaced.inc()

    def ejected(self, pool: Pool) -> None:
        """An instance failed too often, or its probe did: it is left alone for a while."""
        self._ejections[pool].inc()

    # --- the judgement

    def predicted_ttft(self, ratio: float) -> None:
        """A request's real time to first token, divided by the one predicted when it was placed."""
        self._ttft_ratio.observe(ratio)

    def predicted_tbt(self, ratio: float) -> None:
        """An answer's real mean time between tokens, divided by the predicted one."""
        self._tbt_ratio.observe(ratio)

    def refused(self, reason: str) -> None:
        """A request was refused, for one of REASONS."""
        self._refusals[reason if reason in self._refusals else "other"].inc()

    def set_held(self, requests: int, tokens: int) -> None:
        """So many requests wait before their prefill now, with so many tokens in their prompts."""
        self._held.set(requests)
        self._held_tokens.set(tokens)

    def observe_hold(self, seconds: float) -> None:
        """A request was held so long, whether it was admitted then or refused."""
        self._hold.observe(seconds)

    def judged(self, pool: Pool, load: float) -> None:
        """How much of what its limits allow a compute pool carries, as admission saw it last; 1 is full."""
        self._pool_load[pool].set(load)

    # --- instances, as their reports tell

    def set_pool_load(self, pool: Pool, instance: str, load: Load) -> None:
        """An instance's latest report."""
        before = self._counted.get((pool, instance), IDLE)
        self._loads[pool, instance] = self._counted[pool, instance] = load
        _grow(self._steps[pool], before.steps, load.steps)
        _grow(self._preempted, before.preempted, load.preempted)
        _grow(self._evicted, before.evicted, load.evicted)
        _grow(self._over_quota, before.over_quota, load.over_quota)
        _grow(self._bad_frames, before.bad_frames, load.bad_frames)
        _grow(self._events, before.events, load.events)
        _grow(self._events_failed, before.events_failed, load.events_failed)
        _grow(self._replays, before.replays, load.replays)
        _grow(self._replays_abandoned, before.replays_abandoned, load.replays_abandoned)
        _grow(self._listeners_refused, before.listeners_refused, load.listeners_refused)

    def set_stale(self, pool: Pool, instances: int) -> None:
        """So many living instances have not reported lately; the Conductor goes by its own ledger for them."""
        self._stale[pool].set(instances)

    def set_degraded(self, is_degraded: bool) -> None:
        """Whether something is not as it should be while requests are served all the same."""
        self._degraded.set(is_degraded)

    def drop_instance(self, pool: Pool, instance: str) -> None:
        """An instance left, or died."""
        self._loads.pop((pool, instance), None)

    def bad_frames(self, count: int) -> None:
        """Frames that the Conductor itself dropped because they were no message."""
        self._bad_frames.inc(count)

    def _of(self, pool: Pool) -> list[Load]:
        """The latest reports of a pool's living instances."""
        return [load for (of, _), load in self._loads.items() if of is pool]

    def _up_of(self, pool: Pool) -> int:
        """A pool's living instances."""
        return len(self._of(pool))

    def _blocks_of(self, pool: Pool, state: str) -> int:
        """A pool's blocks in a state of BLOCK_STATES."""
        loads = self._of(pool)
        known = {
            "free": sum(load.blocks_free for load in loads),
            "leased": sum(load.blocks_leased for load in loads),
            "pending": sum(load.blocks_pending for load in loads),
        }
        total = sum(load.blocks_total for load in loads)
        return known[state] if state in known else max(0, total - sum(known.values()))

    # --- the series

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _make_latencies(self) -> None:
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._tbt = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of a choice.")
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end, if finished.")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting in an instance's queue.")
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Computing the prompt.")
        self._store_wait = self._histogram(
            "dango:request_store_wait_time_seconds", "Storing KV when the prompt was computed already."
        )
        self._transfer = self._histogram(
            "dango:request_transfer_time_seconds", "Moving KV to the decode instance."
        )
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self._ttft_ratio = self._histogram(
            "dango:ttft_prediction_ratio", "Real time to first token over the predicted one.", RATIOS
        )
        self._tbt_ratio = self._histogram(
            "dango:tbt_prediction_ratio", "Real time between tokens over the predicted one.", RATIOS
        )
        self._hold = self._histogram("dango:hold_time_seconds", "Waiting before the prefill for room in decode.")
        self._prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._output_lengths = self._histogram("vllm:request_generation_tokens", "Tokens of a choice.", TOKENS)

    def _make_counts(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts, cached ones included.")
        self._cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were not computed anew."
        )
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._preempted = self._counter("vllm:num_preemptions", "Requests preempted by decode instances.")
        self._evicted = self._counter("dango:evicted_blocks", "Blocks evicted.")
        self._over_quota = self._counter(
            "dango:quota_refusals", "Leases refused since their tenants are at their quotas."
        )
        self._bad_frames = self._counter("dango:bad_frames", "Frames dropped because they were no message.")
        self._events = self._counter("dango:kv_event_batches", "Batches of KV events published.")
        self._events_failed = self._counter("dango:kv_event_batches_failed", "Batches that could not be sent.")
        self._replays = self._counter("dango:kv_event_replays", "Replays of KV events begun.")
        self._replays_abandoned = self._counter(
            "dango:kv_event_replays_abandoned", "Replays whose reader was gone or too slow."
        )
        self._listeners_refused = self._counter(
            "dango:kv_event_listeners_refused", "Connections of listeners that were ended: there were too many."
        )
        self._placed = self._counter("dango:placements", "Prompts that were given their instances.")
        self._replaced = self._counter("dango:replacements", "Prompts placed again since an instance failed.")
        self._rests = self._counter("dango:rests_on_decode", "Prompts whose rest a decode instance computed.")
        self._not_replaced = self._counter(
            "dango:replacements_denied", "Prompts not placed again since too many have been."
        )
        ejections = Counter(
            "dango:ejections", "Instances left alone for a while.", ["model_name", "pool"], registry=self.registry
        )
        self._ejections = {pool: ejections.labels(self._model, pool.value) for pool in (Pool.PREFILL, Pool.DECODE)}
        refusals = Counter("dango:refusals", "Refusals.", ["model_name", "reason"], registry=self.registry)
        self._refusals = {reason: refusals.labels(self._model, reason) for reason in REASONS}
        steps = Counter("dango:steps", "Forward passes.", ["model_name", "pool"], registry=self.registry)
        self._steps = {pool: steps.labels(self._model, pool.value) for pool in Pool}
        success = Counter(
            "vllm:request_success",
            "Choices that ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._success = {reason: success.labels(self._model, reason.value) for reason in EndReason}
        requests = Counter(
            "dango:requests", "Requests by how they ended.", ["model_name", "outcome"], registry=self.registry
        )
        self._requests = {outcome: requests.labels(self._model, outcome.value) for outcome in Outcome}

    def _make_gauges(self) -> None:
        """Sums over instances are taken when somebody reads them: instances report far more often."""
        self._in_flight = self._gauge("dango:requests_in_flight", "HTTP requests that wait for an answer.")
        loads = self._loads
        running = self._gauge("vllm:num_requests_running", "Requests in the instances' current steps.")
        running.set_function(lambda: sum(load.running for load in loads.values()))
        waiting = self._gauge("vllm:num_requests_waiting", "Requests in the instances' queues.")
        waiting.set_function(lambda: sum(load.waiting for load in loads.values()))
        listeners = self._gauge("dango:kv_event_listeners", "Connected to KV events or their replay.")
        listeners.set_function(lambda: sum(load.listeners for load in loads.values()))
        self._degraded = self._gauge(
            "dango:degraded", "1 while Redis cannot be used, or knows another cluster; requests are served."
        )
        self._held = self._gauge("dango:held_requests", "Requests that wait before their prefill.")
        self._held_tokens = self._gauge("dango:held_tokens", "Prompt tokens of requests that wait so.")
        tenants = self._gauge("dango:tenants", "Tenants that have blocks in the pool's memory.")
        tenants.set_function(lambda: sum(load.tenants for load in loads.values()))
        largest = self._gauge("dango:largest_tenant_blocks", "Blocks in memory of the tenant that has most.")
        largest.set_function(lambda: max((load.largest_tenant for load in loads.values()), default=0))
        load = Gauge(
            "dango:pool_load",
            "Share of what the limits allow that a pool carries.",
            ["model_name", "pool"],
            registry=self.registry,
        )
        self._pool_load = {pool: load.labels(self._model, pool.value) for pool in (Pool.PREFILL, Pool.DECODE)}
        up = Gauge("dango:instances_up", "Instances alive.", ["model_name", "pool"], registry=self.registry)
        stale = Gauge(
            "dango:stale_instances",
            "Instances alive whose latest report is too old to go by.",
            ["model_name", "pool"],
            registry=self.registry,
        )
        self._stale = {pool: stale.labels(self._model, pool.value) for pool in Pool}
        draining = self._gauge("dango:draining_segments", "Segments whose blocks are carried to others.")
        draining.set_function(lambda: sum(load.draining for load in self._of(Pool.KVCACHE)))
        blocks = Gauge(
            "dango:blocks",
            "Blocks of a pool: used (committed, without a lease), free, leased, pending.",
            ["model_name", "pool", "state"],
            registry=self.registry,
        )
        for pool in Pool:
            up.labels(self._model, pool.value).set_function(partial(self._up_of, pool))
            for state in BLOCK_STATES:
                blocks.labels(self._model, pool.value, state).set_function(partial(self._blocks_of, pool, state))


def _grow(counter: Counter, before: int, now: int) -> None:
    """Add by how much a count that starts anew with each life of an instance has grown."""
    if now != before:
        counter.inc(now - before if now > before else now)
