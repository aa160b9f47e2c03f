"""Which chunk is next: order, pages, bounds, and what removal gives back."""

from hypothesis import given
from hypothesis import strategies as st

from engine.paging import Pages
from prefill_pool.schedule import Prompt, Schedule
from protocol.ids import RequestId


def a_schedule(pages: int = 16, prompts_max: int = 8) -> Schedule:
    return Schedule(Pages(pages), block_tokens=4, chunk_tokens=8, prompts_max=prompts_max)


def a_prompt(name: str, tokens: int, reused: int = 0) -> Prompt:
    return Prompt(RequestId(name), tokens, reused)


def test_a_prompt_is_cut_into_chunks_after_its_reused_prefix():
    schedule = a_schedule()
    schedule.add(a_prompt("a", 21, reused=4))
    schedule.start()
    seen = []
    while (chunk := schedule.next()) is not None:
        seen.append((chunk.start, chunk.end, chunk.last))
        schedule.advance(chunk)
    assert seen == [(4, 12, False), (12, 20, False), (20, 21, True)]


def test_first_come_first_served_and_none_overtakes_who_waits_for_pages():
    schedule = a_schedule(pages=4)
    for name, tokens in (("a", 12), ("long", 16), ("short", 1)):
        schedule.add(a_prompt(name, tokens))
    assert [prompt.request for prompt in schedule.start()] == ["a"]
    assert schedule.start() == []
    schedule.remove(RequestId("a"))
    assert [prompt.request for prompt in schedule.start()] == ["long"]


def test_a_full_queue_and_a_known_request_are_refused_and_change_nothing():
    schedule = a_schedule(prompts_max=2)
    assert schedule.add(a_prompt("a", 4))
    assert not schedule.add(a_prompt("a", 4))
    assert schedule.add(a_prompt("b", 4))
    assert not schedule.add(a_prompt("c", 4))
    assert schedule.waiting == 2


def test_an_abandoned_prompt_keeps_its_pages_until_it_is_removed():
    schedule = a_schedule(pages=4)
    schedule.add(a_prompt("a", 16))
    (prompt,) = schedule.start()
    schedule.abandon(prompt.request)
    assert schedule.next() is None
    assert len(prompt.pages) == 4
    schedule.remove(prompt.request)
    schedule.add(a_prompt("b", 16))
    assert len(schedule.start()) == 1


def test_tokens_left_counts_what_is_neither_loaded_nor_computed():
    schedule = a_schedule()
    schedule.add(a_prompt("a", 20, reused=8))
    assert schedule.tokens_left == 12
    schedule.start()
    chunk = schedule.next()
    assert chunk is not None
    schedule.advance(chunk)
    assert schedule.tokens_left == 4


@given(st.lists(st.tuples(st.sampled_from("asnr"), st.integers(0, 5), st.integers(1, 40))))
def test_pages_are_conserved_whatever_happens(acts: list[tuple[str, int, int]]):
    schedule = a_schedule(pages=12)
    for act, name, tokens in acts:
        match act:
            case "a" if schedule.fits(tokens):
                schedule.add(a_prompt(str(name), tokens))
            case "s":
                schedule.start()
            case "n":
                chunk = schedule.next()
                if chunk is not None:
                    schedule.advance(chunk)
            case "r":
                schedule.remove(RequestId(str(name)))
        schedule.check()
