"""The rival: every instance does both phases, and computes prompts in chunks beside its decode rows. Pure.

Nothing here is Dango's: the rule of a rival has no home in the services, so it lives beside the simulator.

step      all decode rows first, a token each; what the budget leaves goes to the oldest prompts, in order of
          arrival, as their next chunks (Sarathi-Serve, OSDI 2024)
cache     each instance has an LRU cache of its own; prompts are computed in order of arrival, so that a prompt can
          reuse what one before it in the queue will have computed (`awaits`)
router    the instance with the least predicted TTFT: its queue, its decode rows and its cached prefix counted
memory    a prompt takes room for itself and its whole answer when its first chunk is computed, or waits

Where the truth is not simple, the rival is given the better of it: the router knows every queue and every step's
time exactly and at once, the length of an answer is known when room is taken (so nothing is ever preempted), and
moving KV between CPU memory and devices takes no time.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.cost import CostModel
from simulator.record import Outcome, gap_figures
from simulator.workload import BLOCK_TOKENS, Arrival


@dataclass(frozen=True)
class Colocated:
    """A cluster of the rival."""

    cost: CostModel
    instances: int
    budget: int
    """Tokens of one step at most: a decode row is one, the rest are of prompts."""
    overlap: bool
    """Whether decode rows read their KV while the chunk computes."""
    segment_tokens: int
    """Cache of each instance."""
    awaits: bool = True
    """Whether a prompt reuses what prompts that queue before it will have computed; else only what is computed
    when it arrives, as in Mooncake's Algorithm 1."""
    refuse_s: float = math.inf
    """A request is refused on arrival when its predicted TTFT is above this."""

    def __post_init__(self) -> None:
        if self.instances < 1 or self.budget < 1:
            raise ValueError("instances and budget are at least 1")

    def step_s(self, rows: float, context: float, tokens: float, pairs: float) -> float:
        """A step of decode rows with so many tokens of context, and chunks of so many tokens and pairs.

        A step without chunks is the cost model's decode step, and one without rows its prefill pass. A step of
        both launches once and reads the weights once:

            launches   the smaller of both bases (a prefill pass has no other), and what each row costs
            reads      weights: what is left of the step's base; KV of the rows' context
            compute    chunks, and the rows as so many tokens more of the same matrix products

        The weights are always read while the products compute. The rows' KV is read meanwhile too (`overlap`), or
        after them.
        """
        step, prefill = self.cost.step, self.cost.prefill
        if not tokens:
            return self.cost.step_s(rows, context)
        launch_s = min(prefill.base_s, step.base_s)
        weights_s, kv_s = step.base_s - launch_s, step.token_s * context
        compute_s = prefill.token_s * (tokens + rows) + prefill.pair_s * pairs
        if self.overlap:
            return launch_s + step.row_s * rows + max(weights_s + kv_s, compute_s)
        return launch_s + step.row_s * rows + max(weights_s, compute_s) + kv_s


def pairs_of(tokens: int, prefix: int) -> float:
    """Pairs of a new token and one that it sees, as a PassCost counts them."""
    return tokens * (prefix + tokens / 2)


@dataclass(slots=True)
class Job:
    """A request on its instance."""

    number: int
    """In order of arrival."""
    arrival: Arrival
    reused: int
    """Tokens of the prompt that are cached."""
    computed: int
    """Tokens whose KV is there, reused ones included."""
    first_at: float = 0.0

    @property
    def room(self) -> int:
        """Tokens of KV at its end."""
        return self.arrival.tokens + self.arrival.output


class Cache:
    """Blocks of one instance, least recently used first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._kept: OrderedDict[int, None] = OrderedDict()

    def reach(self, arrival: Arrival) -> int:
        """Tokens of a prompt that can be reused: whole blocks from its front, and one token is always computed."""
        reach = 0
        for block in arrival.blocks:
            if block not in self._kept:
                break
            reach += BLOCK_TOKENS
        return min(reach, arrival.tokens - 1)

    def keep(self, arrival: Arrival) -> None:
        """Its whole blocks are the most recently used now; its front outlives its end."""
        kept = self._kept
        for block in reversed(arrival.blocks[: arrival.tokens // BLOCK_TOKENS]):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > self._blocks:
            kept.popitem(last=False)


class Instance:
    """One engine: its queue, its rows, its clock. Time moves by `advance` alone.

    Always: a step is over at `clock`, or nothing is to be done; `tokens` and `pairs` are what the queue has left.
    """

    def __init__(self, rival: Colocated, outcomes: list[Outcome | None]) -> None:
        self._rival = rival
        self._outcomes = outcomes
        self._queue: deque[Job] = deque()
        self._rows: list[tuple[int, int, Job]] = []
        """Heap of (the step that gives its last token, number, job)."""
        self._steps: list[float] = []
        """Seconds of each step so far: the gaps of all that decoded in it."""
        self._room = rival.cost.pages_tokens
        self._started = 0
        """Jobs of the queue, from its front, that have room."""
        self.cache = Cache(rival.segment_tokens // BLOCK_TOKENS)
        self.clock = 0.0
        self.context = 0
        self.tokens = 0
        self.pairs = 0.0

    def ttft_s(self, arrival: Arrival, now: float) -> float:
        """Predicted of a new request: what is queued before it and its own, at the present rows."""
        reused, rows = self.cache.reach(arrival), len(self._rows)
        own = arrival.tokens - reused
        tokens, pairs = self.tokens + own, self.pairs + pairs_of(own, reused)
        steps = math.ceil(tokens / max(self._rival.budget - rows, 1))
        step_s = self._rival.step_s(rows, self.context, tokens / steps, pairs / steps)
        return max(self.clock - now, 0.0) + steps * step_s

    def add(self, number: int, arrival: Arrival, now: float) -> None:
        """A request joins the queue."""
        reused = self.cache.reach(arrival)
        if self._rival.awaits:
            self.cache.keep(arrival)
        self._queue.append(Job(number, arrival, reused, reused))
        self.tokens += arrival.tokens - reused
        self.pairs += pairs_of(arrival.tokens - reused, reused)
        self.clock = max(self.clock, now)

    def advance(self, until: float) -> None:
        """Do every step that begins before `until`: what comes then is in the next."""
        while self.clock < until and (self._queue or self._rows):
            self._step()

    def _step(self) -> None:
        rows = len(self._rows)
        tokens, pairs = self._chunks(self._rival.budget - rows)
        seconds = self._rival.step_s(rows, self.context, tokens, pairs)
        self.tokens -= tokens
        self.pairs -= pairs
        self.context += rows
        self.clock += seconds
        self._steps.append(seconds)
        while self._rows and self._rows[0][0] < len(self._steps):
            job = heapq.heappop(self._rows)[2]
            self.context -= job.room
            self._end(job)
        while self._queue and self._queue[0].computed == self._queue[0].arrival.tokens:
            self._first_token(self._queue.popleft())

    def _chunks(self, left: int) -> tuple[int, float]:
        """The oldest prompts go on by at most `left` tokens: how many, and their pairs."""
        tokens, pairs = 0, 0.0
        for place, job in enumerate(self._queue):
            if tokens >= left or (place == self._started and not self._start(job)):
                break
            count = min(job.arrival.tokens - job.computed, left - tokens)
            pairs += pairs_of(count, job.computed)
            job.computed += count
            tokens += count
        return tokens, pairs

    def _start(self, job: Job) -> bool:
        if job.room > self._room:
            return False
        self._room -= job.room
        self._started += 1
        return True

    def _first_token(self, job: Job) -> None:
        self._started -= 1
        job.first_at = self.clock
        if not self._rival.awaits:
            self.cache.keep(job.arrival)
        if job.arrival.output == 1:
            self._end(job)
        else:
            heapq.heappush(self._rows, (len(self._steps) + job.arrival.output - 2, job.number, job))
            self.context += job.arrival.tokens + 1

    def _end(self, job: Job) -> None:
        self._room += job.room
        one = job.arrival
        gaps = self._steps[len(self._steps) - one.output + 1 :] if one.output > 1 else []
        tpot_s, tbt_s = gap_figures([(gap_s, 1) for gap_s in gaps])
        own, prefill = one.tokens - job.reused, self._rival.cost.prefill
        self._outcomes[job.number] = Outcome(
            at_s=one.at_s,
            tokens=one.tokens,
            output=one.output,
            priority=one.priority,
            end_s=self.clock,
            prefill_s=prefill.token_s * own + prefill.pair_s * pairs_of(own, job.reused),
            reused=job.reused,
            first_token_s=job.first_at,
            tpot_s=tpot_s,
            tbt_s=tbt_s,
        )


def simulate_colocated(rival: Colocated, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """What becomes of each request, in order of arrival. Between arrivals instances know nothing of each other."""
    outcomes: list[Outcome | None] = [None] * len(arrivals)
    instances = [Instance(rival, outcomes) for _ in range(rival.instances)]
    for number, arrival in enumerate(arrivals):
        for instance in instances:
            instance.advance(arrival.at_s)
        outcomes[number] = _route(rival, instances, number, arrival)
    for instance in instances:
        instance.advance(math.inf)
    done = [outcome for outcome in outcomes if outcome is not None]
    assert len(done) == len(arrivals), "each request ends"
    return done


def _route(rival: Colocated, instances: Sequence[Instance], number: int, arrival: Arrival) -> Outcome | None:
    """Queue it where its first token is soonest; a refusal is its outcome at once."""
    now = arrival.at_s
    ttft_s, chosen = min((instance.ttft_s(arrival, now), place) for place, instance in enumerate(instances))
    too_long = arrival.tokens + arrival.output > rival.cost.pages_tokens
    if too_long or ttft_s > rival.refuse_s:
        reason = "longer than the memory of an instance" if too_long else "ttft"
        return Outcome(now, arrival.tokens, 0, arrival.priority, end_s=now, refused=reason)
    instances[chosen].add(number, arrival, now)
    return None
