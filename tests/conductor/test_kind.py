"""What is known of one kind of instance: the size of its passes, and how fresh that is."""

from conductor.kind import CHUNK_TOKENS, FRESH_S, Kind
from protocol.registry import Pool, Timing


def passes(*sizes: tuple[int, int]) -> list[Timing]:
    """Neighbouring passes, each of (tokens, prefix)."""
    return [Timing(step, tokens, prefix, 0.1) for step, (tokens, prefix) in enumerate(sizes, 1)]


def test_short_prompts_do_not_show_where_passes_are_cut() -> None:
    kind = Kind(Pool.PREFILL)
    kind.learn(passes((22, 0), (40, 0), (22, 16)), now=0.0)
    assert kind.chunk == CHUNK_TOKENS


def test_a_pass_that_goes_on_shows_it() -> None:
    kind = Kind(Pool.PREFILL)
    kind.learn(passes((22, 0), (64, 0), (64, 64), (10, 128)), now=0.0)
    assert kind.chunk == 64


def test_a_larger_pass_than_assumed_shows_it_too() -> None:
    kind = Kind(Pool.PREFILL)
    kind.learn(passes((2048, 0)), now=0.0)
    assert kind.chunk == 2048


def test_samples_are_fresh_for_a_while() -> None:
    kind = Kind(Pool.DECODE)
    kind.learn(passes((1, 10), (1, 11)), now=0.0)
    kind.learn(passes((1, 12)), now=20.0)
    assert (kind.fresh(20.0), kind.fresh(FRESH_S + 1.0), kind.fresh(FRESH_S + 21.0)) == (3, 1, 0)


def test_reports_at_short_intervals_are_counted_too() -> None:
    kind = Kind(Pool.DECODE)
    for report in range(1000):
        kind.learn(passes((1, 10)), now=0.1 * report)
    assert abs(kind.fresh(100.0) - 10 * FRESH_S) <= 10


def test_the_largest_part_of_a_prompt_in_a_step_is_the_chunk_of_rests() -> None:
    kind = Kind(Pool.DECODE)
    kind.learn([Timing(step, 4, 100, 0.1, rest) for step, rest in enumerate((16, 64, 32), 1)], now=0.0)
    assert kind.rest_chunk == 64
