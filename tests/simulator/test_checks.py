"""The checks see what they are for: each truth is broken here once, on purpose."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from conductor.view import Prefilling
from decode_pool.api import Tokens
from engine.api import EndReason, Sampling
from kvcache_pool.api import Acquire, new_lease
from protocol.ids import Incarnation, RequestId, SegmentId, token_ids
from protocol.registry import Pool
from simulator.checks import Ending, Told, check_always, check_rest, kv_of
from simulator.faults import Client, probe
from simulator.world import World
from tests.simulator.test_world import in_world, served

ANSWER = [11, 12, 13]


def a_told(stops_after: int | None = None) -> Told:
    samplings = [Sampling(max_tokens=3)]
    return Told(Client(0.0, token_ids([1]), samplings, stops_after=stops_after, expected=[ANSWER]))


async def hear(told: Told, *tokens: int, end: bool = False, ending: Ending = Ending.FINISHED) -> Told:
    for token in tokens:
        await told.tokens(0, Tokens([token], [], 0.0))
    if end:
        await told.end(0, EndReason.LENGTH)
    told.ending = ending
    return told


async def test_right_answers_are_right() -> None:
    (await hear(a_told(), *ANSWER, end=True)).check()
    (await hear(a_told(stops_after=2), *ANSWER[:2])).check()
    for ending in (Ending.FAILED, Ending.LEFT, Ending.DIED):
        (await hear(a_told(), *ANSWER[:2], ending=ending)).check()
    (await hear(a_told(), ending=Ending.REFUSED)).check()


@pytest.mark.parametrize(
    ("said", "end", "ending", "what"),
    [
        ([11, 12, 14], True, Ending.FINISHED, "said [11, 12, 14]"),
        ([11, 11, 12], False, Ending.FAILED, "said [11, 11, 12]"),
        ([11, 13], False, Ending.LEFT, "said [11, 13]"),
        ([11, 12], True, Ending.FINISHED, "ended with 2 of 3"),
        ([11, 12, 13], False, Ending.FINISHED, "has no end"),
        ([11], False, Ending.REFUSED, "refused after the first token"),
    ],
)
async def test_a_wrong_answer_is_seen(said: list[int], end: bool, ending: Ending, what: str) -> None:
    told = await hear(a_told(), *said, end=end, ending=ending)
    with pytest.raises(AssertionError, match=re.escape(what)):
        told.check()


async def test_what_is_told_after_an_end_or_twice_is_seen() -> None:
    told = await hear(a_told(), *ANSWER, end=True)
    with pytest.raises(AssertionError, match="after the end"):
        await told.tokens(0, Tokens([14], [], 0.0))
    await told.end(0, EndReason.LENGTH)
    with pytest.raises(AssertionError, match="ended 2 times"):
        told.check()
    stopped = await hear(a_told(stops_after=1), 11)
    stopped.ending = None
    with pytest.raises(AssertionError, match="after the client's stop"):
        await stopped.tokens(0, Tokens([12], [], 0.0))
    with pytest.raises(AssertionError, match="never ended"):
        stopped.check()
    for tell in (Told.admitted, lambda told: told.prefilled(0)):
        twice = await hear(a_told(), *ANSWER, end=True)
        tell(twice)
        tell(twice)
        with pytest.raises(AssertionError, match="2 times"):
            twice.check()


def test_kv_that_is_not_what_its_name_says_is_seen() -> None:
    async def main(world: World) -> None:
        client = probe(0)
        right = kv_of(world, [client.prompt + token_ids(client.expected[0])])
        await served(world, 0)
        await asyncio.sleep(1.0)
        check_always(world, right)
        _, place, grant = next(iter(world.index.named()))
        segment = world.memory.segments[place.segment]
        segment.prints[1][grant.slot] ^= 1
        with pytest.raises(AssertionError, match="what its name does not say"):
            check_always(world, right)
        segment.prints[1][grant.slot] ^= 1
        segment.generations[1][grant.slot] -= 1
        with pytest.raises(AssertionError, match="never written whole"):
            check_always(world, right)

    in_world(main)


async def _lease(world: World) -> None:
    ask = Acquire(new_lease(), RequestId("r"), [], 0, 1, SegmentId("kvcache-0"))
    world.index.acquire(ask, asyncio.get_running_loop().time())


async def _load(world: World) -> None:
    (first, *_) = world.view.of(Pool.PREFILL)
    world.view.enter(first, (RequestId("r"), 0), Prefilling(1, 0, 1.0, 0.0))


async def _send(world: World) -> None:
    world.view.send(SegmentId("kvcache-0"), 1)


async def _take_pages(world: World) -> None:
    service = world.members["decode-0"].service
    assert service is not None
    service._pages.take(1)  # type: ignore[union-attr]


async def _end_by_itself(world: World) -> None:
    world.members["decode-1"].task.cancel()
    await asyncio.sleep(0.1)


async def _forget(world: World) -> None:
    world.view.give_up(world.view.of(Pool.DECODE)[0])


async def _keep(world: World) -> None:
    dead = replace(world.view.of(Pool.DECODE)[0], incarnation=Incarnation("of yesterday"))
    world.peers.of(dead)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (_lease, "held by nobody"),
        (_load, "ledger still has"),
        (_send, "on their way for ever"),
        (_take_pages, "^$"),  # by its own check
        (_end_by_itself, "the view has|ended by itself"),
        (_forget, "the view has"),
        (_keep, "connections to the dead"),
    ],
)
def test_what_is_left_at_rest_is_seen(spoil: Callable[[World], Awaitable[None]], what: str) -> None:
    async def main(world: World) -> None:
        check_rest(world)
        await spoil(world)
        with pytest.raises(AssertionError, match=what):
            check_rest(world)

    in_world(main)
