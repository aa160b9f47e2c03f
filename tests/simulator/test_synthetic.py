"""Made traffic has the rate, the bursts and the lengths that it was asked for, and one seed makes it twice."""

from itertools import pairwise
from random import Random
from statistics import mean, pstdev

import pytest

from simulator.synthetic import LogNormal, Phase, synthesize
from simulator.workload import BLOCK_TOKENS, Arrival


def cv_of(arrivals: list[Arrival]) -> float:
    gaps = [later.at_s - one.at_s for one, later in pairwise(arrivals)]
    return pstdev(gaps) / mean(gaps)


def counts_per_second(arrivals: list[Arrival], span_s: int) -> list[int]:
    counts = [0] * span_s
    for arrival in arrivals:
        counts[int(arrival.at_s)] += 1
    return counts


@pytest.mark.parametrize("phase", [Phase(2000, 5.0), Phase(2000, 5.0, cv=3), Phase(2000, 5.0, on_s=2, off_s=6)])
def test_the_rate_holds_however_bursty(phase: Phase) -> None:
    made = synthesize([phase], Random(3))
    assert len(made) == pytest.approx(10_000, rel=0.1)
    assert all(0 <= one.at_s < 2000 for one in made)
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)


def test_gaps_vary_as_asked() -> None:
    assert cv_of(synthesize([Phase(4000, 5.0)], Random(1))) == pytest.approx(1.0, rel=0.05)
    assert cv_of(synthesize([Phase(4000, 5.0, cv=3)], Random(1))) == pytest.approx(3.0, rel=0.1)


def test_there_is_silence_between_periods_that_are_on() -> None:
    counts = counts_per_second(synthesize([Phase(2000, 5.0, on_s=10, off_s=30)], Random(1)), 2000)
    assert counts.count(0) > 1200
    assert mean(sorted(counts)[-300:]) > 15


def test_traffic_shifts_in_mid_run() -> None:
    before, after = Phase(1000, 2.0), Phase(1000, 8.0, input=LogNormal(2000), output=LogNormal(50, sigma=0.1))
    made = synthesize([before, after], Random(1))
    first = [one for one in made if one.at_s < 1000]
    second = [one for one in made if one.at_s >= 1000]
    assert len(second) == pytest.approx(4 * len(first), rel=0.1)
    assert mean(one.tokens for one in second) == pytest.approx(2000, rel=0.1)
    assert mean(one.output for one in second) == pytest.approx(50, rel=0.02)


def test_lengths_stay_within_their_bounds() -> None:
    rng, length = Random(1), LogNormal(100, sigma=2.0, shortest=10, longest=500)
    drawn = [length.draw(rng) for _ in range(2000)]
    assert (min(drawn), max(drawn)) == (10, 500)


def test_beginnings_are_shared_in_whole_blocks_the_first_most() -> None:
    made = synthesize([Phase(500, 5.0, prefixes=4, prefix_tokens=4 * BLOCK_TOKENS)], Random(1))
    assert all(len(one.blocks) == -(-one.tokens // BLOCK_TOKENS) for one in made)
    long = [one.blocks for one in made if one.tokens >= 4 * BLOCK_TOKENS]
    heads = [tuple(blocks[:4]) for blocks in long]
    shares = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert len(shares) == 4
    assert shares[0] > 1.5 * shares[1]
    rest = [block for blocks in long for block in blocks[4:]]
    assert len(set(rest)) == len(rest), "after the beginning every block is a prompt's own"
    assert not set(rest) & {block for head in heads for block in head}


def test_one_seed_makes_the_same_traffic() -> None:
    phases = [Phase(100, 5.0, cv=2, prefixes=3, prefix_tokens=1024), Phase(50, 9.0, on_s=1, off_s=1)]
    assert synthesize(phases, Random("a")) == synthesize(phases, Random("a")) != synthesize(phases, Random("b"))


@pytest.mark.parametrize(
    "words",
    [{"rate": 0}, {"span_s": -1}, {"cv": 0}, {"on_s": 1}, {"prefix_tokens": 100}, {"prefixes": -1}],
)
def test_what_makes_no_traffic_is_refused(words: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(words))):
        Phase(**{"span_s": 1, "rate": 1, **words})  # type: ignore[arg-type]
