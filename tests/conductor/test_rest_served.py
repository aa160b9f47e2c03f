"""Prompts whose rest a decode instance computes itself, in a whole cluster: the same words, and no prefill."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from conductor.ask import Refused
from conductor.config import ConductorConfig
from engine.api import EndReason
from kvcache_pool.api import Directory, Found
from protocol.ids import BlockHash, Incarnation
from protocol.registry import Pool, Timing
from tests.cluster import Cluster, Listener, a_cluster, an_ask
from tests.fakes import LAYOUT, foretell

PROMPT = [(11 * i) % 101 for i in range(22)]
LONG = [(3 * i) % 103 for i in range(90)]


@asynccontextmanager
async def a_taught_cluster(decodes: int = 1, *, layer_s: float = 0.0, **config: object) -> AsyncIterator[Cluster]:
    """Prefill is known to be slow, and decode to be fast also where it computes part of a prompt."""
    settings = ConductorConfig(block_tokens=LAYOUT.block_tokens, **config)  # type: ignore[arg-type]
    async with a_cluster(decodes=decodes, layer_s=layer_s, config=settings) as cluster:
        teach(cluster)
        async with asyncio.timeout(10):
            for heard in cluster.heard.values():
                await heard.wait()
        yield cluster


def teach(cluster: Cluster) -> None:
    estimates, now = cluster.dispatcher._admission.estimates, asyncio.get_running_loop().time()
    slow = [Timing(step, 8, 0, 2.0) for step in range(1, 40)]
    steps = [Timing(step, 1, 30, 0.002) for step in range(1, 40)]
    rests = [Timing(step, 1, 30, 0.003, rest, 0) for step, rest in enumerate([16, 64, 128] * 20, 40)]
    estimates.learn(Pool.PREFILL, "", Incarnation("earlier"), slow, now)
    estimates.learn(Pool.DECODE, "", Incarnation("earlier too"), [*steps, *rests], now)


def prefilled(cluster: Cluster) -> int:
    return cluster.engines["prefill-0"].tokens_computed


@pytest.mark.parametrize("on", [True, False])
async def test_turns_of_a_chat_say_the_same_with_and_without(on: bool):
    async with a_taught_cluster(rests_on_decode=on) as cluster:
        turn, reused = list(PROMPT), []
        for more in range(3):
            reply = await cluster.serve(an_ask(turn, 7))
            assert reply.said[0] == foretell(turn, 7)
            assert reply.ended == {0: EndReason.LENGTH}
            reused += reply.reused
            turn += [*reply.said[0], 5 + more, 6, 7]
            await cluster.cached((len(turn) - 4) // 4)  # all but the last token of the answer
        assert reused == [0, 28, 36]
        assert (prefilled(cluster) == 0) == on
        await cluster.at_rest()


async def test_what_is_seen_of_it_is_what_is_seen_of_a_prefill():
    async with a_taught_cluster() as cluster:
        await cluster.serve(an_ask(PROMPT, 6))
        for name in (
            "dango:ttft_prediction_ratio",
            "vllm:request_queue_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
        ):
            assert cluster.counted(f"{name}_count") == 1, name
        assert cluster.counted("dango:request_transfer_time_seconds_count") == 0
        assert cluster.counted("dango:placements_total") == 1
        assert cluster.counted("dango:rests_on_decode_total") == 1


async def test_the_ledger_has_it_on_its_decode_instance_only():
    async with a_taught_cluster(layer_s=0.02, admission="none") as cluster:
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 4)))
        (decode,), (prefill,) = cluster.view.of(Pool.DECODE), cluster.view.of(Pool.PREFILL)
        async with asyncio.timeout(5):
            while not decode.streams:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0)
        assert decode.computes_rest
        assert not prefill.prompts
        second = asyncio.create_task(cluster.serve(an_ask([1, *PROMPT], 4)))  # one rest at a time
        assert (await task).said[0] == foretell(PROMPT, 4)
        assert (await second).said[0] == foretell([1, *PROMPT], 4)
        assert prefilled(cluster) == len(PROMPT) + 1
        await cluster.at_rest()


async def test_choices_share_a_prefill_as_before():
    async with a_taught_cluster() as cluster:
        reply = await cluster.serve(an_ask(PROMPT, 6, choices=2))
        assert reply.said == {n: foretell(PROMPT, 6) for n in range(2)}
        assert prefilled(cluster) == len(PROMPT)


async def test_an_answer_of_one_token_is_one_pass():
    async with a_taught_cluster() as cluster:
        reply = await cluster.serve(an_ask(PROMPT, 1))
        assert (reply.said[0], reply.ended) == (foretell(PROMPT, 1), {0: EndReason.LENGTH})
        assert cluster.engines["decode-0"].passes == 1


async def test_a_decode_instance_that_dies_before_the_first_token_is_replaced():
    async with a_taught_cluster(decodes=2, layer_s=0.05) as cluster:
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 4)))
        async with asyncio.timeout(5):
            while not any(engine.layers_run for engine in cluster.engines.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        (busy,) = [one.name for one in cluster.view.of(Pool.DECODE) if one.streams]
        await cluster.kill(busy)
        reply = await task
        assert (reply.said[0], reply.reused) == (foretell(PROMPT, 4), [0])
        assert cluster.counted("dango:replacements_total") == 1
        assert prefilled(cluster) == 0
        await cluster.at_rest()


async def test_one_that_dies_midway_is_replaced_with_the_tokens_so_far():
    async with a_taught_cluster(decodes=2, layer_s=0.01) as cluster:
        reply = Listener()
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 30), reply))
        async with asyncio.timeout(10):
            while len(reply.said.get(0, [])) < 10:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.005)
        (busy,) = [one.name for one in cluster.view.of(Pool.DECODE) if one.streams]
        await cluster.kill(busy)
        await task
        assert (reply.said[0], reply.reused) == (foretell(PROMPT, 30), [0])
        await cluster.at_rest()


async def test_the_only_decode_instance_dies_before_the_first_token():
    async with a_taught_cluster(layer_s=0.1) as cluster:
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 4)))
        async with asyncio.timeout(5):
            while not cluster.engines["decode-0"].layers_run:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.005)
        await cluster.kill("decode-0")
        with pytest.raises(Refused, match="no decode instance"):  # nothing was said yet
            await task


async def test_a_client_that_leaves_during_the_rest_leaves_nothing_behind():
    async with a_taught_cluster(layer_s=0.05) as cluster:
        task = asyncio.create_task(cluster.serve(an_ask(LONG, 4)))
        async with asyncio.timeout(5):
            while not cluster.engines["decode-0"].layers_run:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.at_rest()


async def test_a_prefix_that_went_since_the_lookup_is_not_computed_unjudged(monkeypatch: pytest.MonkeyPatch):
    """The request is placed again, by what is cached then."""
    whole, lies = Directory.lookup, [Found(5, {"kvcache-0": 5})]

    async def lookup(directory: Directory, blocks: list[BlockHash]) -> Found:
        return lies.pop() if lies else await whole(directory, blocks)

    monkeypatch.setattr(Directory, "lookup", lookup)
    async with a_taught_cluster() as cluster:
        reply = await cluster.serve(an_ask(PROMPT, 6))
        assert (reply.said[0], reply.reused) == (foretell(PROMPT, 6), [0])
        assert cluster.counted("dango:replacements_total") == 1
        await cluster.at_rest()


async def test_at_decode_tests_after_the_prefill_and_so_has_one():
    async with a_taught_cluster(admission="at_decode") as cluster:
        assert (await cluster.serve(an_ask(PROMPT, 6))).said[0] == foretell(PROMPT, 6)
        assert prefilled(cluster) == len(PROMPT)


async def test_without_a_measured_time_everything_goes_through_prefill():
    async with a_cluster() as cluster:
        assert (await cluster.serve(an_ask(PROMPT, 6))).said[0] == foretell(PROMPT, 6)
        assert prefilled(cluster) == len(PROMPT)
