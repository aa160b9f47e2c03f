"""From a setup to the configuration of every simulated process."""

from collections.abc import Sequence
from typing import Any

from conductor.config import ConductorConfig
from decode_pool.config import DecodeConfig
from prefill_pool.config import PrefillConfig
from simulator.setup import Setup
from simulator.workload import BLOCK_TOKENS, Arrival
from simulator.world import Plan

IN_FLIGHT_MAX = 100_000
"""No bound but admission's shall refuse here."""

BATCH_MAX = 4096
"""Rows of a decode step: latency limits and memory bind before."""


def plan_of(setup: Setup, arrivals: Sequence[Arrival]) -> Plan:
    """What to build for a setup and its workload."""
    cost = setup.cost()
    longest = max((arrival.tokens + arrival.output for arrival in arrivals), default=1)
    step = setup.block_tokens
    pages = cost.pages_tokens // step
    context = min(max(longest + step, 2 * step), pages * step)
    blocks = sum(len(arrival.blocks) + 1 for arrival in arrivals)
    segment = -(-setup.segment_tokens // step) or blocks + step
    common: dict[str, Any] = {"block_tokens": step, "context_tokens": context}
    return Plan(
        cost=cost,
        prefills=setup.prefill,
        decodes=setup.decode,
        conductor=_conductor(setup, common),
        prefill=PrefillConfig(**common, chunk_tokens=setup.chunk_tokens, queue_max=IN_FLIGHT_MAX),
        decode=DecodeConfig(
            **common,
            steps_max=setup.steps_max,
            stream_interval=setup.stream_interval,
            batch_max=BATCH_MAX,
            queue_max=IN_FLIGHT_MAX,
            chunk_tokens=BLOCK_TOKENS,
            write_back=False,
        ),
        segment_blocks=segment,
        prefill_pages=pages,
        decode_pages=pages,
        context_tokens=context,
        seed=setup.seed,
        size_blind=setup.size_blind,
    )


def _conductor(setup: Setup, common: dict[str, Any]) -> ConductorConfig:
    return ConductorConfig(
        **common,
        in_flight_max=IN_FLIGHT_MAX,
        held_max=IN_FLIGHT_MAX,
        held_tokens_max=1 << 40,
        placement=setup.placement,  # type: ignore[arg-type]  # Setup has checked it
        balancing_threshold=setup.balancing_threshold,
        rests_on_decode=setup.rests_on_decode,
        rest_steps_max=setup.rest_steps_max,
        admission=setup.admission,  # type: ignore[arg-type]
        reserve=setup.reserve,
        hold=setup.hold,
        reserve_z=setup.z,
        margin=setup.margin,
        hysteresis=setup.hysteresis,
        overtaken_max=setup.overtaken_max,
        rescue_share=setup.rescue_share,
        residence_s=setup.residence_s,
        report_s=setup.report_s,
        ttft_limit_s=setup.ttft_limit_s,
        tbt_limit_s=setup.tbt_limit_s,
    )
