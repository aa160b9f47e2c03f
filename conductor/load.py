"""How much of what the limits allow a pool carries, as the Mooncake report defines it. Pure."""

from conductor.ask import Limits
from conductor.estimate import Estimates
from conductor.view import Instance, View
from protocol.registry import Pool


def pool_load(view: View, estimates: Estimates, pool: Pool, limits: Limits, now: float) -> float:
    """The Mooncake report's load of the prefill or the decode pool: its predicted latency over the limit.

    Prefill: the longest queue over the TTFT limit; decode: the mean step time, with what runs now, over the TBT
    limit. 0 for an empty pool, and where there is no limit."""
    instances = view.of(pool)
    if not instances:
        return 0.0
    if pool is Pool.PREFILL:
        return max(instance.queue_s(now) for instance in instances) / limits.ttft_s
    return sum(_step_s(instance, estimates) for instance in instances) / len(instances) / limits.tbt_s


def _step_s(instance: Instance, estimates: Estimates) -> float:
    """Of a step with what the ledger says runs there; 0 of an idle instance."""
    rows, context = instance.batch
    return estimates.step(instance.kind).at(rows, context) if rows else 0.0
