"""When tokens came, as a client of a simulated run sees it."""

import asyncio

import pytest

from decode_pool.api import Tokens
from simulator.drive import Watch
from simulator.loop import run_virtual


@pytest.mark.parametrize(("drawn_in_s", "gap_s"), [(0.0, 0.2), (0.03, 0.5)])
def test_the_gap_before_the_second_token_counts_without_a_transfer_only_if_there_was_one(
    drawn_in_s: float, gap_s: float
) -> None:
    """A first token that took a step comes from decode, which goes on at once."""

    async def main() -> Watch:
        watch = Watch(transfer_s=0.2)
        await watch.tokens(0, Tokens([5], [], [drawn_in_s]))
        await asyncio.sleep(0.5)
        await watch.tokens(0, Tokens([6], [], [0.1]))
        return watch

    watch = run_virtual(main())
    assert watch.gaps == [(pytest.approx(gap_s), 1)]
    assert watch.hand_over_s == pytest.approx(0.0 if drawn_in_s else 0.5)
