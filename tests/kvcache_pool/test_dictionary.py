"""The pool against a dictionary: what was committed and not evicted, discarded or lost is found, no more. Once the
index alone, and once through the service, its client, and sockets between them."""

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache_pool.api import PoolFull
from kvcache_pool.index import Index
from protocol.ids import BlockHash, Incarnation, SegmentId
from tests.kvcache_pool.builders import a_place, an_ask, an_index, names
from tests.kvcache_pool.served import Served

SLOTS = {"a": 3, "b": 2}
NAMES = names(*range(6))


class Dictionary(RuleBasedStateMachine):
    """The model: for each segment, the names that it has. Evictions are counted by the index, and believed."""

    over_rpc: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.index: Index | Served = Served(**SLOTS) if self.over_rpc else an_index(**SLOTS)
        self.model: dict[str, set[BlockHash]] = {segment: set() for segment in SLOTS}
        self.lives = dict.fromkeys(SLOTS, "a")

    def seen(self) -> dict[str, set[BlockHash]]:
        found: dict[str, set[BlockHash]] = {segment: set() for segment in SLOTS}
        for name in NAMES:
            for segment in self.index.find([name]).held:
                found[segment].add(name)
        return found

    @rule(chain=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True), near=st.sampled_from("ab"))
    def store(self, chain: list[BlockHash], near: str) -> None:
        evicted = self.index.stats().evicted
        try:
            lease = self.index.acquire(an_ask(chain, near=near), 0.0)
        except PoolFull:
            assert self.seen() == self.model
            return
        left = self.seen()
        gone = sum(len(self.model[segment] - left[segment]) for segment in SLOTS)
        assert gone == self.index.stats().evicted - evicted
        assert all(left[segment] <= self.model[segment] for segment in SLOTS)
        self.model = left
        known = len(lease.sources)
        self.index.commit(lease.lease, list(range(len(lease.targets))), chain[known:], 0.0)
        for name, grant in zip(chain[known:], lease.targets, strict=True):
            self.model[grant.segment].add(name)
        self.index.release(lease.lease)

    @rule(name=st.sampled_from(NAMES))
    def discard(self, name: BlockHash) -> None:
        if any(name in held for held in self.model.values()):
            lease = self.index.acquire(an_ask([name]), 0.0)
            self.index.discard(lease.sources)
            self.index.release(lease.lease)
            self.model[lease.sources[0].segment].discard(name)

    @rule(chosen=st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    def remove(self, chosen: list[BlockHash]) -> None:
        known = set().union(*self.model.values()) & set(chosen)
        assert self.index.remove(chosen) == len(known)
        for held in self.model.values():
            held -= known

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == sum(map(len, self.model.values()))
        self.model = {segment: set() for segment in SLOTS}

    @rule(segment=st.sampled_from("ab"))
    def restart(self, segment: str) -> None:
        self.lives[segment] += "a"
        place = a_place(segment, SLOTS[segment], self.lives[segment])
        self.index.leave(SegmentId(segment), Incarnation(self.lives[segment][:-1]))
        assert self.index.announce(place, 0, 0.0)
        self.model[segment] = set()

    @rule(chain=st.lists(st.sampled_from(NAMES), max_size=6, unique=True))
    def prefix(self, chain: list[BlockHash]) -> None:
        """The unbroken prefix, over all segments and of each."""
        found = self.index.find(chain)
        everywhere = set().union(*self.model.values())
        assert found.reach == unbroken(chain, everywhere)
        reaches = {segment: unbroken(chain, held) for segment, held in self.model.items()}
        assert found.held == {segment: reach for segment, reach in reaches.items() if reach}

    @invariant()
    def found_is_what_was_stored(self) -> None:
        assert self.seen() == self.model
        stats = self.index.stats()
        assert (stats.cached, stats.reserved, stats.leases) == (sum(map(len, self.model.values())), 0, 0)
        assert stats.free + stats.cached == stats.total == sum(SLOTS.values())
        self.index.check()

    def teardown(self) -> None:
        if isinstance(self.index, Served):
            self.index.close()


class OverRpc(Dictionary):
    over_rpc = True


def unbroken(chain: list[BlockHash], held: set[BlockHash]) -> int:
    return next((count for count, name in enumerate(chain) if name not in held), len(chain))


TestDictionary = Dictionary.TestCase
TestOverRpc = OverRpc.TestCase
TestDictionary.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestOverRpc.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
