"""A request under way, and its choices, as the dispatcher carries them."""

import asyncio
from dataclasses import dataclass, field

from conductor.admitted import Admitted, Told, Wanted
from conductor.ask import Ask, Reply
from conductor.lease import HeldLease
from conductor.place import Prompt
from decode_pool.api import Decode, Joined
from engine.api import Sampling
from kvcache_pool.api import Acquire, Lease, PoolFull, new_lease
from prefill_pool.api import Prefill
from protocol.ids import BlockHash, Ids, Incarnation, RequestId, tenant_id, token_ids


@dataclass
class Choice:
    """One answer to the prompt, as far as it has come."""

    index: int
    sampling: Sampling
    output: Ids = field(default_factory=token_ids)
    ended: bool = False
    step_s: float = 0.0
    """What the first step after joining was predicted to take; 0 when that has been compared."""
    joined: Joined | None = None
    """Its decode instance has loaded the prefix and computes the rest of the prompt; None before and after."""
    decode_from: float = 0.0
    """When its first token was there, or its decode instance was asked for that."""


@dataclass
class Job:
    """A request under way: what was asked, who hears the answer, and when it must be over."""

    ask: Ask
    reply: Reply
    ends_at: float
    request: RequestId
    """What instances know it by; each choice that is placed again is a request of its own to them."""
    reused_tokens: int = 0
    told: Told = field(default_factory=Told)
    """One for all jobs that this request has become."""
    failed_by: set[Incarnation] = field(default_factory=set)
    """Lives of instances that have failed it: it is not placed there again. One for all jobs, as above."""

    def admitted(self) -> None:
        """An attempt begins; the client hears of the first."""
        if not self.told.admitted:
            self.told.admitted = True
            self.reply.admitted()

    def prefilled(self, reused_tokens: int) -> None:
        """The prompt is computed; the client hears of the first time, unless it has tokens already."""
        if not (self.told.prefilled or self.told.tokens):
            self.told.prefilled = True
            self.reused_tokens = reused_tokens
            self.reply.prefilled(reused_tokens)

    @property
    def arrived_at(self) -> float:
        """When its client asked."""
        return self.ends_at - self.ask.within_s - self.ask.waited_s

    @property
    def left_s(self) -> float:
        """Seconds left of the deadline."""
        return max(self.ends_at - asyncio.get_running_loop().time(), 0.0)


@dataclass(frozen=True)
class Placed:
    """An admitted request with its lease, and the request's tokens and block names under it."""

    admitted: Admitted
    held: HeldLease
    lease: Lease
    tokens: Ids
    blocks: list[BlockHash]
    """Of those that the lease names: all full ones, or only what a decode instance loads."""


def wanted_of(job: Job, choices: list[Choice], tokens: int, block_tokens: int) -> Wanted:
    """A job as admission sees it, with a prompt of so many tokens."""
    return Wanted(
        request=job.request,
        prompt=Prompt(tokens, (tokens - 1) // block_tokens, job.failed_by),
        choices=[choice.index for choice in choices],
        priority=job.ask.priority,
        limits=job.ask.limits,
        arrived_at=job.arrived_at,
        ends_at=job.ends_at,
        told=job.told,
    )


def acquire_message(
    job: Job, admitted: Admitted, blocks: list[BlockHash], tail: int, blocks_total: float
) -> Acquire:
    """What to lease, all of it the tenant's; `tail` is 1 if the last token is in no full block. Raises PoolFull
    when that is more than the pool's `blocks_total`."""
    plan, rest, tenant = admitted.plan, admitted.rest, tenant_id(job.ask.tenant)
    if rest is not None:
        return Acquire(new_lease(), job.request, blocks, rest.reuse, 0, rest.near, tenant=tenant)
    if len(blocks) + tail > blocks_total:
        raise PoolFull(f"{len(blocks) + tail} blocks wanted, the pool has {blocks_total}")
    ask = (blocks, plan.reuse, tail, plan.near)
    return Acquire(new_lease(), job.request, *ask, copies=plan.reuse, tenant=tenant)


def prefill_message(job: Job, choices: list[Choice], placed: Placed, directory: str) -> Prefill:
    """What the prefill instance is asked to do; `directory` is where it commits."""
    lease = placed.lease
    return Prefill(
        request=job.request,
        tokens=placed.tokens,
        prompt_tokens=len(job.ask.prompt),
        blocks=placed.blocks,
        directory=directory,
        lease=lease.lease,
        sources=lease.sources,
        targets=lease.targets,
        places=lease.places,
        samplings=[choice.sampling for choice in choices],
        copies=lease.copies,
        wants_tokens=lease.wants_tokens,
    )


def decode_message(job: Job, choice: Choice, placed: Placed) -> Decode:
    """What the decode instance of a choice is asked to do."""
    lease, rest = placed.lease, placed.admitted.rest
    return Decode(
        request=job.request,
        choice=choice.index,
        prompt=job.ask.prompt,
        output=choice.output,
        blocks=placed.blocks,
        tenant=job.ask.tenant,
        salt=job.ask.salt,
        sources=lease.sources + lease.targets,
        places=lease.places,
        sampling=choice.sampling,
        chunk_tokens=0 if rest is None else rest.chunk,
        near=None if rest is None else rest.near,
    )
