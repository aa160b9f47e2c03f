"""What goes wrong, and what is asked meanwhile: one seed draws one script, so what it finds can be replayed.

0 s                                                 LASTS_S                    at most CALM_S later
├── requests, clients that leave ───────────────────┤ all alive, clear weather ┤ every truth of checks.py
├── deaths, partitions, slow instances, bad weather ┤                          ┤ and one more request is served
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from conductor.ask import NO_LIMITS, Limits, Priority
from conductor.config import ConductorConfig
from decode_pool.config import DecodeConfig
from engine.api import Sampling
from kvcache_pool.api import LEASE_S
from kvcache_pool.leases import QUARANTINE_S
from prefill_pool.config import PrefillConfig
from protocol.ids import Ids, token_ids
from simulator.cost import CostModel, PassCost, StepCost
from simulator.engine import VOCAB, foretell
from simulator.network import Weather
from simulator.world import LAYERS, Plan

LASTS_S = 20.0
"""Faults and arrivals. Longer than all times after which somebody is given up, several times over."""

WITHIN_S = 25.0
"""A request's deadline: what was lost on its way is waited for no longer."""

CALM_S = LEASE_S + QUARANTINE_S + 15.0
"""When the last request has ended, everything must have come to rest after so long: by then the lease of somebody
who died has ended, and the quarantine of its slots."""

CONTEXT = 112
"""The longest prompt and answer together."""

COST = CostModel(
    name="small",
    layers=LAYERS,
    kv_bytes_token=64,
    prefill=PassCost(0.002, 0.001, 0.0),
    step=StepCost(0.01, 0.001, 0.0),
    host_bytes_s=1e5,
    network_bytes_s=5e4,
    pages_tokens=CONTEXT,
)
"""Prompts take 10 to 80 ms and answers up to half a second: every phase lasts long enough to be hit."""


class Kind(Enum):
    """What can happen to a process."""

    DEATH = "dies"
    """It is gone without a word, and comes back with no memory."""
    PARTITION = "is cut off"
    """Nothing goes in or out."""
    SLOWNESS = "is slow"
    """Its passes and steps take many times as long."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    for_s: float
    kind: Kind
    name: str
    """Whose misfortune: a member of the World."""

    def __str__(self) -> str:
        return f"{self.at_s:6.3f} s: {self.name} {self.kind.value} for {self.for_s:.3f} s"


@dataclass(frozen=True)
class Client:
    """Who asks, and how patiently."""

    at_s: float
    prompt: Ids
    samplings: list[Sampling]
    priority: Priority = Priority.INTERACTIVE
    limits: Limits = NO_LIMITS
    leaves_after_s: float | None = None
    """In the middle of it; None stays."""
    stops_after: int | None = None
    """Tokens of a choice after which the client has found its stop string; None finds none."""
    expected: list[list[int]] = field(default_factory=list)
    """The whole answer of each choice."""


@dataclass(frozen=True)
class Script:
    """Everything that one seed stands for."""

    seed: int
    plan: Plan
    clients: list[Client]
    faults: list[Fault]

    @property
    def swift(self) -> bool:
        """Whether nobody waits long: nobody is slow, and no message is lost, which nobody notices."""
        return not self.plan.weather.lost and all(fault.kind is Kind.DEATH for fault in self.faults)


def script_of(seed: int) -> Script:
    """Draw it. Equal seeds give equal scripts."""
    dice = random.Random(f"faults {seed}")
    plan = _plan(seed, dice)
    return Script(seed, plan, _clients(dice), _faults(dice, plan))


def probe(number: int) -> Client:
    """A request after all faults: like no other, so that everything must be computed."""
    dice = random.Random(f"probe {number}")
    return _answered(Client(0.0, _text(dice, 50), [Sampling(max_tokens=24)]))


def _plan(seed: int, dice: random.Random) -> Plan:
    block_tokens = dice.choice((4, 8))
    common: dict[str, Any] = {"block_tokens": block_tokens, "context_tokens": CONTEXT}
    longest = CONTEXT // block_tokens
    policy = dice.choice(("survival", "survival", "survival", "predictive", "early", "at_decode", "none", "none"))
    return Plan(
        cost=COST,
        prefills=dice.choice((2, 2, 3)),
        decodes=2,
        conductor=ConductorConfig(
            **common,
            admission=policy,  # type: ignore[arg-type]  # one of its names
            hold=dice.random() < 0.8,
            held_max=dice.choice((4, 64)),
            overtaken_max=2,
            batch_age_s=2.0,
        ),
        prefill=PrefillConfig(**common, chunk_tokens=dice.choice((2, 8)) * block_tokens),
        decode=DecodeConfig(
            **common, steps_max=dice.choice((1, 8)), batch_max=8, chunk_tokens=16, write_back=dice.random() < 0.7
        ),
        segment_blocks=dice.randint(longest, 3 * longest),
        prefill_pages=dice.randint(longest, 3 * longest),
        decode_pages=dice.choice((1, 2, 4, 16)) * longest,
        context_tokens=CONTEXT,
        seed=seed,
        exact=True,
        weather=_weather(dice),
    )


def _weather(dice: random.Random) -> Weather:
    """A third of the seeds has none: then every death is seen alone."""
    if dice.random() < 1 / 3:
        return Weather(delay_s=0.0005)
    return Weather(
        delay_s=0.0005,
        jitter_s=dice.choice((0.0, 0.005, 0.05)),
        lost=dice.choice((0.0, 0.001, 0.005)),
        doubled=dice.choice((0.0, 0.01, 0.1)),
    )


# --- what is asked


def _clients(dice: random.Random) -> list[Client]:
    shared = [_text(dice, dice.randint(4, 40)) for _ in range(3)]
    busy_s = dice.choice((2.0, LASTS_S))  # all at once, or all the time
    count = dice.randint(20, 40)
    return sorted((_client(dice, shared, busy_s) for _ in range(count)), key=lambda client: client.at_s)


def _client(dice: random.Random, shared: Sequence[Ids], busy_s: float) -> Client:
    prompt = dice.choice((*shared, token_ids())) + _text(dice, dice.randint(1, 30))
    choices = 1 if dice.random() < 0.8 else dice.randint(2, 3)
    samplings = [_sampling(dice, seed, prompt) for seed in range(choices)]
    leaves, stops = dice.random() < 0.15, dice.random() < 0.1
    return _answered(
        Client(
            dice.uniform(0.0, busy_s),
            prompt,
            samplings,
            dice.choice((Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH)),
            dice.choice((NO_LIMITS, NO_LIMITS, Limits(5.0, 0.5), Limits(1.0, 0.02), Limits(0.2, 0.05))),
            dice.uniform(0.0, 1.0) if leaves else None,
            dice.randint(1, 8) if stops else None,
        )
    )


def _sampling(dice: random.Random, seed: int, prompt: Ids) -> Sampling:
    """Most answers end by their length, some by a token."""
    length = dice.randint(1, 40)
    if dice.random() < 0.8:
        return Sampling(seed=seed, max_tokens=length)
    stop = foretell(prompt, length, LAYERS)[-1]
    return Sampling(seed=seed, max_tokens=length + 2, stop_tokens=[stop])


def _answered(client: Client) -> Client:
    longest = max(sampling.max_tokens for sampling in client.samplings)
    told = foretell(client.prompt, longest, LAYERS)
    answers = []
    for sampling in client.samplings:
        answer = told[: sampling.max_tokens]
        ends = [answer.index(token) + 1 for token in sampling.stop_tokens if token in answer]
        answers.append(answer[: min(ends, default=sampling.max_tokens)])
    return replace(client, expected=answers)


def _text(dice: random.Random, tokens: int) -> Ids:
    return token_ids(dice.randrange(VOCAB) for _ in range(tokens))


# --- what goes wrong


def _faults(dice: random.Random, plan: Plan) -> list[Fault]:
    hosts = range(plan.prefills)
    names = [f"{pool}-{number}" for pool in ("prefill", "kvcache") for number in hosts]
    names += [f"decode-{number}" for number in range(plan.decodes)]
    drawn = [_fault(dice, [*names, "kvcache-0", "conductor"]) for _ in range(dice.randint(1, 8))]
    return sorted(drawn, key=lambda fault: fault.at_s)


def _fault(dice: random.Random, names: Sequence[str]) -> Fault:
    name, at_s = dice.choice(names), dice.uniform(0.0, LASTS_S - 0.5)
    kinds = [Kind.DEATH, Kind.DEATH, Kind.PARTITION]
    if name.startswith(("prefill", "decode")):
        kinds.append(Kind.SLOWNESS)
    for_s = dice.choice((dice.uniform(0.01, 0.5), dice.uniform(0.5, 10.0)))
    return Fault(at_s, min(for_s, LASTS_S - at_s), dice.choice(kinds), name)
