"""Who joins, who waits, who gives way: order, pages, progress."""

from hypothesis import given
from hypothesis import strategies as st

from decode_pool.schedule import Plan, Schedule, Sequence
from engine.paging import Pages
from protocol.ids import token_ids

STEP = 4


def a_schedule(pages: int = 8, batch_max: int = 8, queue_max: int = 16) -> Schedule:
    return Schedule(Pages(pages), STEP, batch_max, queue_max, chunk=8)


def a_sequence(name: str, tokens: int) -> Sequence:
    return Sequence((name, 0), token_ids(range(tokens)), tokens - 1)


def joined(schedule: Schedule, *sequences: Sequence) -> None:
    for sequence in sequences:
        assert schedule.add(sequence)
        assert schedule.admit() == [sequence]
        schedule.join(sequence, len(sequence.tokens) - 1)


def run_step(schedule: Schedule, hindered: list[Sequence] | None = None, more: int = 0) -> list[Plan]:
    """One step; or, if all plans are plain, up to `more` steps after it."""
    plans = schedule.step((hindered if hindered is not None else []).append)
    steps = 1
    if plans and all(plan.plain for plan in plans):
        steps = min(1 + more, schedule.steps_on(plans))
    for plan in plans:
        schedule.advance(plan, [0] * steps if plan.draws else [])
    schedule.check()
    return plans


def test_a_joined_sequence_computes_its_last_token_and_draws_the_next():
    schedule = a_schedule()
    sequence = a_sequence("a", 5)
    joined(schedule, sequence)
    (plan,) = run_step(schedule)
    assert (plan.start, plan.end, plan.draws) == (4, 5, True)
    assert len(sequence.tokens) == 6


def test_a_sequence_takes_a_page_only_when_its_last_one_is_full():
    schedule = a_schedule()
    sequence = a_sequence("a", 3)
    joined(schedule, sequence)
    pages = []
    for _ in range(6):
        run_step(schedule)
        pages.append(len(sequence.pages))
    assert pages == [1, 1, 2, 2, 2, 2]


def test_nobody_overtakes_who_waits_for_pages():
    schedule = a_schedule(pages=4)
    joined(schedule, a_sequence("a", 8))
    for name, tokens in (("long", 16), ("short", 2)):
        schedule.add(a_sequence(name, tokens))
    assert schedule.admit() == []
    schedule.remove(("a", 0))
    assert [s.key[0] for s in schedule.admit()] == ["long"]


def test_the_youngest_gives_way_and_comes_back_first():
    schedule = a_schedule(pages=5)
    old, young = a_sequence("old", 8), a_sequence("young", 7)
    joined(schedule, old, young)
    schedule.add(a_sequence("newcomer", 2))
    hindered: list[Sequence] = []
    for _ in range(3):
        run_step(schedule, hindered)
    assert hindered == [young]
    assert schedule.preempted == 1
    assert old.pages
    assert not young.pages
    schedule.remove(("old", 0))
    assert [s.key[0] for s in schedule.admit()] == ["young", "newcomer"]


def test_nobody_is_let_in_at_the_price_of_a_preemption():
    """Whoever is here fills his last page sooner or later: a page for each stays free."""
    schedule = a_schedule(pages=4)
    joined(schedule, a_sequence("here", 5))
    schedule.add(a_sequence("newcomer", 6))
    assert schedule.admit() == []
    schedule.remove(("here", 0))
    assert [s.key[0] for s in schedule.admit()] == ["newcomer"]
    assert schedule.preempted == 0


def test_what_was_lost_is_recomputed_in_chunks_beside_the_batch():
    schedule = a_schedule(pages=16)
    whole, lost = a_sequence("whole", 5), a_sequence("lost", 20)
    joined(schedule, whole)
    schedule.add(lost)
    schedule.admit()
    schedule.join(lost, 0)
    seen = [[(p.sequence.key[0], p.start, p.end, p.draws) for p in run_step(schedule)] for _ in range(3)]
    assert [step[0] for step in seen] == [("whole", n, n + 1, True) for n in (4, 5, 6)]
    assert [step[1][1:] for step in seen] == [(0, 8, False), (8, 16, False), (16, 20, True)]


def test_a_batch_is_bounded_and_so_is_the_queue():
    schedule = a_schedule(batch_max=2, queue_max=3)
    assert [schedule.add(a_sequence(name, 2)) for name in "abcd"] == [True, True, True, False]
    assert len(schedule.admit()) == 2
    assert not schedule.add(a_sequence("a", 2))


def test_a_run_ends_where_the_first_of_its_pages_is_full():
    schedule = a_schedule()
    joined(schedule, a_sequence("a", 5), a_sequence("b", 7))
    plans = schedule.step([].append)
    assert all(plan.plain for plan in plans)
    assert schedule.steps_on(plans) == 2  # b computes the tokens 6 and 7
    for plan in plans:
        schedule.advance(plan, [0, 0])
    schedule.check()
    assert [(plan.sequence.computed, len(plan.sequence.tokens)) for plan in plans] == [(6, 7), (8, 9)]
    assert [plan.start for plan in schedule.step([].append)] == [6, 8]


@given(st.data())
def test_pages_are_conserved_and_the_oldest_always_moves_on(data: st.DataObject):
    schedule = a_schedule(pages=8, batch_max=4)
    for turn in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(("add", "admit", "step", "remove"))):
            case "add":
                schedule.add(a_sequence(str(turn), data.draw(st.integers(2, 31))))
            case "admit":
                for sequence in schedule.admit():
                    schedule.join(sequence, data.draw(st.integers(0, len(sequence.tokens) - 1)))
            case "step":
                oldest = next(iter(schedule._running.values()), None)
                before = oldest.computed if oldest else 0
                plans = run_step(schedule, more=data.draw(st.integers(0, 3)))
                if oldest is not None:
                    assert plans[0].sequence is oldest
                    assert oldest.computed > before
                for plan in plans:
                    if len(plan.sequence.tokens) >= 32:
                        schedule.remove(plan.sequence.key)
            case "remove" if schedule._running:
                schedule.remove(data.draw(st.sampled_from(sorted(schedule._running))))
        schedule.check()
