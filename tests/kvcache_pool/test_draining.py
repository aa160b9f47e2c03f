"""A segment that is drained: what leaves it, in which order, where to, and what is never lost. The index alone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache_pool.api import CannotDrain, Carried, Carry, Lease, Note, PinKind, Place, PoolFull, Tier, new_lease
from kvcache_pool.eviction import EVICTIONS
from kvcache_pool.index import Index
from kvcache_pool.leases import QUARANTINE_S
from protocol.ids import BlockHash, Incarnation, SegmentId, TenantId, tenant_id
from tests.kvcache_pool.builders import HOST, LAYOUT, a_place, an_ask, an_index, cache, copy, names

A, B, C = SegmentId("a"), SegmentId("b"), SegmentId("c")


def note(index: Index) -> None:
    """All segments note down what they hear, as half a second later."""
    for segment in index.segments():
        number = -1
        while (told := index.news(segment, number))[0]:
            number = told[1]


def begin(index: Index, limit: int = 64, *, segment: SegmentId = A, avoid: tuple[SegmentId, ...] = ()) -> "Round":
    ask = Carry(new_lease(), segment, limit, [*avoid])
    return Round(index, ask, index.carry(ask, 0.0))


class Round:
    """One round of the owner: what it carries, between its question and its commit."""

    def __init__(self, index: Index, ask: Carry, carried: Carried) -> None:
        self._index = index
        self._ask = ask
        self.carried = carried

    @property
    def numbers(self) -> list[int]:
        return [int.from_bytes(name, "big") for name in self.carried.blocks]

    def end(self, *, good: int = 10**6) -> int:
        """Commit so many, and release. Returns how many."""
        blocks = self.carried.blocks[:good]
        if blocks:
            self._index.commit(self._ask.lease, [*range(len(blocks))], blocks, 0.0)
        self._index.release(self._ask.lease)
        self._index.check()
        return len(blocks)


def drain(index: Index, segment: SegmentId = A, limit: int = 2) -> list[int]:
    """Until nothing more is carried. Returns the numbers of what was, in order."""
    index.drain(segment)
    carried: list[int] = []
    while (one := begin(index, limit, segment=segment)).carried.blocks:
        carried += one.numbers
        one.end()
    note(index)
    index.settle()
    begin(index, segment=segment)
    index.check()
    return carried


def held(index: Index, segment: SegmentId) -> set[int]:
    return {int.from_bytes(name, "big") for name, place, _ in index.named() if place.segment == segment}


def order(index: Index, segment: SegmentId) -> list[int]:
    """What goes next comes first."""
    slots = index._segments[segment]
    return [int.from_bytes(slots.names[slot] or b"", "big") for slot in slots.idle]


def is_empty(index: Index, segment: SegmentId = A) -> bool:
    return next(one for one in index.segment_stats() if one.segment == segment).free == 4


def test_all_is_carried_and_what_was_used_last_goes_first() -> None:
    index = an_index(a=4, b=8)
    cache(index, 1, 2, near="a")
    cache(index, 3, near="a")
    cache(index, 1, near="a")
    assert drain(index) == [1, 3, 2]
    assert is_empty(index)
    assert held(index, B) == {1, 2, 3}
    assert index.stats().evicted == 0
    assert index.stats().copies == 0
    assert [one.draining for one in index.segment_stats()] == [True, False]


@pytest.mark.parametrize("limit", [1, 2, 3, 64])
def test_the_order_of_use_is_kept_whatever_the_rounds(limit: int) -> None:
    index = an_index(a=8, b=16)
    cache(index, 8, 9, near="b")
    for chain in ((1, 2, 3), (4, 5), (6, 7), (1, 2)):
        cache(index, *chain, near="a")
    before = order(index, A)
    assert before == [3, 5, 4, 7, 6, 2, 1]
    drain(index, limit=limit)
    assert order(index, B) == [9, 8, *before], "ends of prompts still go before their fronts"
    cache(index, 8, near="b")
    assert order(index, B)[-1] == 8


def test_no_slot_is_given_there_any_more() -> None:
    index = an_index(a=8, b=4)
    cache(index, 1, near="a")
    index.drain(A)
    assert {grant.segment for grant in cache(index, 2, 3, near="a").targets} == {B}
    copied = copy(index, 2, 3, near="a")
    assert (copied.copies, index.stats().copies) == ([], 0)
    with pytest.raises(PoolFull, match="5 blocks wanted, 4 can be had"):
        index.acquire(an_ask(names(4, 5, 6, 7, 8), near="a"), 0.0)
    index.check()


def test_a_full_pool_loses_what_it_would_have_evicted_next() -> None:
    index = an_index(a=4, b=4)
    for number in (1, 11, 2, 12, 3, 13, 4, 14):
        cache(index, number, near="a" if number < 10 else "b")
    assert drain(index, limit=1) == [4, 3]
    assert is_empty(index)
    assert held(index, B) == {3, 4, 13, 14}, "the last four of all"


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_drain_ends_in_any_order_of_eviction(eviction: str) -> None:
    index = an_index(a=4, b=4, eviction=eviction)
    for number in (1, 11, 2, 12, 3, 13, 4, 14):
        cache(index, number, near="a" if number < 10 else "b")
    drain(index)
    assert is_empty(index)
    assert len(held(index, B)) == 4
    assert 14 in held(index, B), "nothing here is hotter"


def test_a_leased_block_is_readable_until_the_lease_ends_and_elsewhere_meanwhile() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, near="a")
    reader = index.acquire(an_ask(names(1, 2)), 0.0)
    assert drain(index) == [1, 2] or held(index, B) == {1, 2}
    assert held(index, A) == held(index, B) == {1, 2}, "the reader reads where it was told"
    assert {grant.segment for grant in index.acquire(an_ask(names(1, 2)), 0.0).sources} == {B}
    index.release(reader.lease)
    index.settle()
    assert is_empty(index)
    index.check()


def test_what_is_being_written_is_committed_and_then_carried() -> None:
    index = an_index(a=4, b=4)
    writer = index.acquire(an_ask(names(1, 2), unnamed=1, near="a"), 0.0)
    index.drain(A)
    assert begin(index).numbers == []
    index.commit(writer.lease, [0, 1], names(1, 2), 0.0)
    assert index.find(names(1, 2)).reach == 2
    index.release(writer.lease)
    assert sorted(drain(index)) == [1, 2]
    assert is_empty(index)


def test_a_late_writer_keeps_its_slot_from_being_called_empty() -> None:
    index = an_index(a=4, b=4)
    index.acquire(an_ask(names(1), near="a", lease_s=1.0), 0.0)
    drain(index)
    index.expire(2.0)
    assert not is_empty(index)
    index.expire(2.0 + QUARANTINE_S)
    assert is_empty(index)


def test_pins_move_with_their_blocks_and_end_when_they_would_have() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, 3, near="a")
    index.pin(names(1), PinKind.HARD, 50.0)
    index.pin(names(2), PinKind.SOFT, 60.0)
    drain(index)
    assert is_empty(index)
    assert index.stats().pinned == 2
    index.expire(50.0)
    assert index.stats().pinned == 1
    index.expire(60.0)
    assert index.stats().pinned == 0
    index.check()


def test_a_pin_is_with_the_committed_copy_should_the_drained_segment_die_now() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, near="a")
    index.pin(names(1), PinKind.HARD, 50.0)
    index.drain(A)
    begin(index).end()
    index.leave(A, Incarnation("a"))
    assert (held(index, B), index.stats().pinned) == ({1}, 1)


def test_a_hard_pin_that_fits_nowhere_waits_and_its_block_is_read_meanwhile() -> None:
    index = an_index(a=4, b=4, hard_pins_share=0.5)
    cache(index, 1, near="a")
    cache(index, 11, 12, near="b")
    assert index.pin(names(11, 12), PinKind.HARD, 90.0) == 2
    assert index.pin(names(1), PinKind.HARD, 40.0) == 1
    assert drain(index) == []
    assert held(index, A) == {1}
    index.unpin(names(12))
    assert drain(index) == [1]
    assert (is_empty(index), index.stats().pinned) == (True, 2)


def test_a_pinned_block_takes_the_place_of_what_is_not_pinned_however_hot() -> None:
    index = an_index(a=4, b=2)
    cache(index, 1, 2, near="a")
    cache(index, 11, 12, near="b")
    index.pin(names(1), PinKind.SOFT, 90.0)
    drain(index)
    assert held(index, B) == {1, 11}
    assert is_empty(index)


def test_soft_pins_of_others_are_not_evicted_for_a_drain() -> None:
    index = an_index(a=4, b=2)
    cache(index, 11, 12, near="b")
    index.pin(names(11, 12), PinKind.SOFT, 90.0)
    cache(index, 1, near="a")
    index.pin(names(1), PinKind.SOFT, 50.0)
    assert drain(index) == []
    assert (held(index, A), held(index, B)) == ({1}, {11, 12})
    index.expire(50.0)
    drain(index)
    assert is_empty(index), "not pinned any more it is dropped"


def test_a_prompt_stays_together_in_one_segment() -> None:
    index = an_index(a=8, b=8, c=9)
    cache(index, 1, 2, 3, 4, near="a")
    drain(index, limit=64)
    assert (held(index, B), held(index, C)) == (set(), {1, 2, 3, 4})


def test_what_is_elsewhere_already_is_forgotten_and_not_carried() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, near="a")
    copy(index, 1, near="b")
    assert index.stats().copies == 1
    assert drain(index) == [2]
    assert is_empty(index)
    assert index.stats().copies == 0, "the only one is no copy"


def test_nothing_is_forgotten_before_its_new_segment_has_noted_it() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, near="a")
    note(index)
    index.drain(A)
    begin(index).end()
    assert index.settle() == 0
    assert held(index, A) == {1}
    note(index)
    assert index.settle() == 1
    assert is_empty(index)


def test_what_its_new_segment_loses_is_carried_again() -> None:
    index = an_index(a=4, b=4, c=4)
    cache(index, 1, near="a")
    index.drain(A)
    first = begin(index)
    first.end()
    index.leave(first.carried.targets[0].segment, Incarnation("a"))
    index.settle()
    index.check()
    assert begin(index).end() == 1
    note(index)
    index.settle()
    assert is_empty(index)
    assert index.find(names(1)).reach == 1


def test_a_round_that_fails_changes_nothing_but_the_order_of_trying() -> None:
    index = an_index(a=4, b=4, c=4)
    cache(index, 1, 2, near="a")
    index.drain(A)
    one = begin(index, avoid=(C,))
    assert {grant.segment for grant in one.carried.targets} == {B}
    one.end(good=1)
    assert index.find(names(1, 2)).reach == 2
    assert begin(index, avoid=(B, C)).carried.blocks == []
    assert index.find(names(1, 2)).reach == 2, "what cannot be reached now is no reason to drop anything"
    again = begin(index, avoid=(B,))
    assert {grant.segment for grant in again.carried.targets} == {C}
    again.end()
    note(index)
    index.settle()
    assert is_empty(index)


def test_a_carrier_that_dies_leaves_its_blocks_to_the_next() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, near="a")
    index.drain(A)
    begin(index)
    index.expire(100.0)
    index.check()
    assert index.find(names(1, 2)).reach == 2
    index.expire(100.0 + QUARANTINE_S)
    assert sorted(drain(index)) == [1, 2]
    assert is_empty(index)


def test_a_bad_block_is_not_carried_for_ever() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, near="a")
    index.drain(A)
    one = begin(index)
    index.discard([one.carried.sources[0]])
    index.commit(one._ask.lease, [1], one.carried.blocks[1:], 0.0)
    one._index.release(one._ask.lease)
    assert drain(index) == []
    assert is_empty(index)
    assert held(index, B) == {2}


def test_removed_and_cleared_blocks_do_not_come_back() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, near="a")
    index.drain(A)
    index.remove(names(1))
    index.clear()
    assert drain(index) == []
    assert index.stats().cached == 0


def test_undone_it_is_a_segment_like_any_other() -> None:
    index = an_index(a=4, b=4)
    cache(index, 1, 2, near="a")
    index.drain(A)
    begin(index, 1).end()
    index.drain(A, undo=True)
    note(index)
    assert index.settle() == 0
    index.check()
    assert begin(index).carried.blocks == []
    assert {grant.segment for grant in cache(index, 5, near="a").targets} == {A}
    assert index.drain(A, undo=True) == 3
    assert not index.draining(A)
    index.check()


def test_who_cannot_be_drained_is_told_why() -> None:
    index = an_index(a=4, b=4)
    with pytest.raises(CannotDrain, match="there is no segment x; there are: a, b"):
        index.drain(SegmentId("x"))
    with pytest.raises(CannotDrain, match="there is no segment x"):
        index.drain(SegmentId("x"), undo=True)
    assert index.drain(B) == index.drain(B) == 0
    with pytest.raises(CannotDrain, match="a cannot be drained: no other memory stays"):
        index.drain(A)
    assert not index.draining(A)
    index.drain(B, undo=True)
    index.drain(A)


def test_a_new_directory_goes_on_with_a_drain_and_a_known_one_knows_better() -> None:
    index = Index()
    index.announce(a_place("a", 4), 0, 0.0, draining=True)
    index.announce(a_place("b", 4), 0, 0.0)
    notes = [Note(n, n + 1, name) for n, name in enumerate(names(1, 2, 3))]
    assert index.adopt(A, Incarnation("a"), notes) == 3
    index.check()
    assert begin(index, 1).numbers == [3], "what was written last counts as hottest"
    index.expire(100.0)
    index.announce(a_place("a", 4), 0, 100.0, draining=False)
    assert index.draining(A)
    index.announce(a_place("a", 4, "later"), 0, 100.0, draining=False)
    assert index.draining(A), "it was killed before it heard"
    index.drain(A, undo=True)
    index.announce(a_place("a", 4, "last"), 0, 100.0, draining=True)
    assert not index.draining(A)


def test_a_disk_is_drained_into_free_memory_and_evicts_nothing() -> None:
    index = an_index(a=4)
    disk = SegmentId("a.disk")
    index.announce(Place(disk, Incarnation("d"), "", HOST, "", 8, LAYOUT, Tier.DISK), 0, 0.0)
    for number in (1, 2, 3, 4, 5, 6):
        cache(index, number, near="a")
        due = [name for name, *_ in index.due(A, 9)]
        lease = index.acquire(an_ask(due, near="a.disk", reuse=0), 0.0)
        index.commit(lease.lease, [*range(len(due))], due, 0.0)
        index.release(lease.lease)
    index.discard([grant for name, place, grant in index.named() if place.segment == A and name == names(6)[0]])
    assert held(index, disk) == {1, 2, 3, 4, 5, 6}
    assert drain(index, disk) == [6]
    assert (held(index, A), held(index, disk)) == ({3, 4, 5, 6}, set())


def test_a_block_moves_with_its_pin_and_counts_against_no_budget() -> None:
    index = an_index(a=4, b=4, copies_share=0.0)
    cache(index, 1, 2, 3, near="a")
    index.pin(names(1), PinKind.HARD, 50.0)
    reader = index.acquire(an_ask(names(3)), 0.0)
    ask = an_ask(names(1, 2, 3), near="b", copies=10, moves=True)
    lease = index.acquire(ask, 0.0)
    assert [one.source for one in lease.copies] == [0, 1, 2]
    index.commit(lease.lease, [0, 1, 2], names(1, 2, 3), 0.0)
    index.release(lease.lease)
    note(index)
    assert index.settle() == 2
    assert (held(index, A), held(index, B), index.stats().copies) == ({3}, {1, 2, 3}, 0)
    assert [one.pinned for one in index.segment_stats()] == [0, 1]
    index.release(reader.lease)
    assert index.settle() == 1
    index.check()


TENANTS = (tenant_id("even"), tenant_id("odd"))
chains = st.sampled_from(([0, 2, 4], [1, 3, 5])).flatmap(
    lambda own: st.lists(st.sampled_from(own), min_size=1, max_size=3, unique=True)
)
"""Each is one tenant's."""
segments = st.sampled_from("abc")


def owner(chain: list[int]) -> TenantId:
    return TENANTS[chain[0] % 2]


class Drains(RuleBasedStateMachine):
    """Three segments, each with room for all: whatever is drained, undone, abandoned or killed after it has been
    noted elsewhere, nothing that was ever committed is lost or becomes another tenant's, and what a lease names
    stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.index = an_index(a=24, b=24, c=24, tenant_share=0.9)
        self.lives = dict.fromkeys("abc", 0)
        self.stored: set[int] = set()
        self.leases: list[tuple[Lease, list[BlockHash]]] = []
        self.rounds: list[Round] = []
        self.hard: set[int] = set()

    @rule(chain=chains, near=segments)
    def store(self, chain: list[int], near: str) -> None:
        cache(self.index, *chain, near=near, tenant=owner(chain))
        self.stored |= {*chain}

    @rule(chain=chains, near=segments, copies=st.integers(0, 4), moves=st.booleans())
    def hold(self, chain: list[int], near: str, copies: int, moves: bool) -> None:
        if len(self.leases) < 3:
            ask = an_ask(names(*chain), near=near, copies=copies, moves=moves, tenant=owner(chain))
            self.leases.append((self.index.acquire(ask, 0.0), names(*chain)))

    @rule(number=st.integers(0, 2), commit=st.booleans())
    def let_go(self, number: int, commit: bool) -> None:
        if number < len(self.leases):
            lease, chain = self.leases.pop(number)
            if commit:
                blocks = [*chain[len(lease.sources) :], *(chain[one.source] for one in lease.copies)]
                self.index.commit(lease.lease, [*range(len(blocks))], blocks, 0.0)
                there = (name for name in chain if self.index.find([name]).reach)  # its segment may be gone
                self.stored |= {int.from_bytes(name, "big") for name in there}
            self.index.release(lease.lease)

    @rule(segment=segments, undo=st.booleans())
    def drain(self, segment: str, undo: bool) -> None:
        others = [one for one in "abc" if one != segment and not self.index.draining(SegmentId(one))]
        if undo or others or self.index.draining(SegmentId(segment)):
            self.index.drain(SegmentId(segment), undo=undo)

    @rule(segment=segments, limit=st.integers(1, 4), avoid=segments)
    def begin(self, segment: str, limit: int, avoid: str) -> None:
        if len(self.rounds) < 2:
            self.rounds.append(begin(self.index, limit, segment=SegmentId(segment), avoid=(SegmentId(avoid),)))

    @rule(good=st.integers(0, 4))
    def end(self, good: int) -> None:
        if self.rounds:
            self.rounds.pop().end(good=good)

    @rule(chain=chains, kind=st.sampled_from(PinKind))
    def pin(self, chain: list[int], kind: PinKind) -> None:
        pinned = {*chain[: self.index.pin(names(*chain), kind, 1e6, owner(chain))]}
        self.hard = self.hard | pinned if kind is PinKind.HARD else self.hard - pinned

    @rule()
    def note(self) -> None:
        note(self.index)
        self.index.settle()

    @rule(segment=segments)
    def kill(self, segment: str) -> None:
        """Its owner is killed, and its next life brings what it noted."""
        note(self.index)
        slots = SegmentId(segment)
        notes = self.index.catalogue(slots, -1, 99)
        draining = self.index.draining(slots)
        self.index.leave(slots, Incarnation(f"a{self.lives[segment]}" if self.lives[segment] else "a"))
        self.lives[segment] += 1
        self.index.announce(a_place(segment, 24, f"a{self.lives[segment]}"), 1 << 40, 0.0, draining=draining)
        self.index.adopt(slots, Incarnation(f"a{self.lives[segment]}"), notes)
        self.hard.clear()  # pins are the directory's memory of that life

    @invariant()
    def nothing_is_lost(self) -> None:
        self.index.check()
        assert all(self.index.find(names(number)).reach for number in self.stored)
        for segment in self.index.segments():
            for one in self.index.catalogue(segment, -1, 99):
                assert one.tenant == owner([int.from_bytes(one.name, "big")])
        there = {grant for _, _, grant in self.index.named()}
        lives = {one.segment: one.incarnation for one in self.index.segment_stats()}
        for lease, _ in self.leases:
            places = {place.segment: place.incarnation for place in lease.places}
            living = [grant for grant in lease.sources if lives[grant.segment] == places[grant.segment]]
            assert there >= {*living}
        pinned = {
            int.from_bytes(name, "big")
            for slots in self.index._segments.values()
            for slot, name in enumerate(slots.names)
            if name is not None and slots.idle.kind(slot) is PinKind.HARD
        }
        assert pinned >= self.hard

    def teardown(self) -> None:
        """What is drained is empty, once nobody uses it."""
        while self.leases:
            self.index.release(self.leases.pop()[0].lease)
        for one in self.rounds:
            one.end()
        for _ in range(8):  # one that is carried may have to make room for another
            for segment in self.index.segments():
                if self.index.draining(segment):
                    begin(self.index, segment=segment).end()
            note(self.index)
            self.index.settle()
        for one in self.index.segment_stats():
            assert not one.draining or one.free == one.total
        self.nothing_is_lost()


TestDrains = Drains.TestCase
TestDrains.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


class TightDrains(Drains):
    """So few slots, and such small quotas, that all are in each other's way: the laws hold, and hard pins; and no
    drain waits for a quota."""

    def __init__(self) -> None:
        super().__init__()
        self.index = an_index(a=3, b=2, c=3, tenant_share=0.6)

    @rule(chain=chains, near=segments)
    def store(self, chain: list[int], near: str) -> None:
        try:
            cache(self.index, *chain, near=near, tenant=owner(chain))
        except PoolFull:
            return

    @rule(chain=chains, near=segments, copies=st.integers(0, 4), moves=st.booleans())
    def hold(self, chain: list[int], near: str, copies: int, moves: bool) -> None:
        try:
            super().hold(chain, near, copies, moves)
        except PoolFull:
            return

    @rule(number=st.integers(0, 2), commit=st.booleans())
    def let_go(self, number: int, commit: bool) -> None:
        super().let_go(number, commit)
        self.stored.clear()

    @rule(segment=segments)
    def kill(self, segment: str) -> None:
        """Not here: what is left has other slots."""

    def teardown(self) -> None:
        self.index.unpin(names(*range(6)))
        self.hard.clear()
        super().teardown()


TestTightDrains = TightDrains.TestCase
TestTightDrains.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
