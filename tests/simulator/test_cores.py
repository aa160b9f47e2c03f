"""Cores that are shared: who computes beside others takes longer, and no work is lost or done twice."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cores import Cores
from simulator.loop import run_virtual

TWO = (1.0, 0.8)
"""Two cores; both busy, each is a fifth slower."""


def ends(cores: Cores, works: list[tuple[float, float]]) -> list[float]:
    """When each of (start, work) is done."""

    async def one(at_s: float, seconds: float) -> float:
        await asyncio.sleep(at_s)
        await cores.compute(seconds)
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        return list(await asyncio.gather(*(one(*work) for work in works)))

    return run_virtual(main())


def test_one_alone_takes_its_time() -> None:
    assert ends(Cores(TWO), [(0.0, 2.0)]) == pytest.approx([2.0])


def test_machines_of_their_own_slow_nobody_down() -> None:
    assert ends(Cores(), [(0.0, 2.0), (0.0, 3.0), (1.0, 2.0)]) == pytest.approx([2.0, 3.0, 3.0])


def test_two_slow_each_other_down_only_while_both_compute() -> None:
    # Both from 1 to 2.25: each has done 1 then. The first had 1 before, the second has 1 left.
    assert ends(Cores(TWO), [(0.0, 2.0), (1.0, 2.0)]) == pytest.approx([2.25, 3.25])


def test_four_share_two_cores() -> None:
    assert Cores(TWO).speed(4) == pytest.approx(0.4)
    assert ends(Cores(TWO), [(0.0, 1.0)] * 4) == pytest.approx([2.5] * 4)


def test_one_who_leaves_makes_room() -> None:
    cores = Cores((1.0,))

    async def main() -> float:
        other = asyncio.create_task(cores.compute(10.0))
        asyncio.get_running_loop().call_later(1.0, other.cancel)
        await cores.compute(1.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1.5)


moments = st.floats(0, 100, allow_nan=False).map(lambda x: round(x, 3))


@given(st.lists(st.tuples(moments, moments), min_size=1, max_size=12), st.integers(1, 4))
def test_all_work_is_done_and_never_faster_than_the_cores_can(
    works: list[tuple[float, float]], cores: int
) -> None:
    done = ends(Cores([1.0] * cores), works)
    assert all(end >= at + work - 1e-6 for end, (at, work) in zip(done, works, strict=True))
    assert max(done) >= min(at for at, _ in works) + sum(work for _, work in works) / cores - 1e-6
