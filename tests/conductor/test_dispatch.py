"""The life of a request over a whole cluster in one process: the text foretold, whatever dies on the way."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from conductor.admission import Admission, Lookup
from conductor.admit import Candidate, Gate, Judgement, Verdict
from conductor.admitted import Admitted, Wanted
from conductor.ask import Failed, Refused
from conductor.config import ConductorConfig
from conductor.view import Stream
from decode_pool.api import Tokens
from decode_pool.config import DecodeConfig
from engine.api import EndReason, Sampling
from kvcache_pool.api import Directory
from kvcache_pool.slots import Shares
from kvcache_pool.transfer.mover import Reach
from protocol.errors import DeadlineExceeded, PeerLost
from protocol.ids import RequestId, tenant_id
from protocol.registry import Pool
from tests.cluster import Listener, a_cluster, an_ask
from tests.fakes import LAYOUT, FakeEngine, foretell

PROMPT = [(11 * i) % 101 for i in range(22)]
BLOCKS = 100
LONG = [(3 * i) % 103 for i in range(90)]


def overwrite_first_runs(segment: Path) -> None:
    """Spoil layer 0 of every slot behind everybody's back."""
    size = segment.stat().st_size
    with segment.open("r+b") as file:
        for at in range(size - BLOCKS * 4096, size, 4096):
            file.seek(at)
            file.write(b"\x5a" * LAYOUT.run_bytes)


@pytest.mark.parametrize("reach", [Reach.SHM, Reach.TCP])
async def test_cold_warm_and_the_next_turn(reach: Reach):
    async with a_cluster(reach=reach) as cluster:
        await cluster.heard["decode-0"].wait()
        cold = await cluster.serve(an_ask(PROMPT, 12))
        assert cold.said[0] == foretell(PROMPT, 12)
        assert cold.ended == {0: EndReason.LENGTH}
        assert cold.reused == [0]
        warm = await cluster.serve(an_ask(PROMPT, 12))
        assert warm.said == cold.said
        assert warm.reused == [20]
        await cluster.cached((len(PROMPT) + 11) // 4)
        # The answer's own full blocks were written back: the next turn finds them.
        turn = [*PROMPT, *cold.said[0], 5, 6, 7]
        after = await cluster.serve(an_ask(turn, 6))
        assert after.said[0] == foretell(turn, 6)
        assert after.reused == [(len(PROMPT) + 11) // 4 * 4]
        await cluster.at_rest()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40])
async def test_block_borders(length: int):
    """B21: lengths around block borders, three times each; whole blocks, and never the last token."""
    async with a_cluster() as cluster:
        prompt = LONG[:length]
        replies = [await cluster.serve(an_ask(prompt, 5)) for _ in range(3)]
        assert all(reply.said[0] == foretell(prompt, 5) for reply in replies)
        assert [reply.reused for reply in replies] == [[0], *[[(length - 1) // 4 * 4]] * 2]


async def test_many_at_once_over_two_of_everything():
    async with a_cluster(2, 2, 2) as cluster:
        prompts = [[n % 7, *LONG[: 5 * (n % 13)]] for n in range(40)]
        replies = await asyncio.gather(*(cluster.serve(an_ask(p, 10)) for p in prompts))
        assert [reply.said[0] for reply in replies] == [foretell(p, 10) for p in prompts]
        await cluster.at_rest()
        assert all(engine.passes > 0 for engine in cluster.engines.values())


async def test_choices_share_one_prefill():
    async with a_cluster() as cluster:
        reply = await cluster.serve(an_ask(PROMPT, 6, choices=3))
        assert reply.said == {n: foretell(PROMPT, 6) for n in range(3)}
        assert cluster.engines["prefill-0"].tokens_computed == len(PROMPT)
        await cluster.at_rest()


async def test_one_token_needs_no_decode_step():
    async with a_cluster() as cluster:
        reply = await cluster.serve(an_ask(PROMPT, 1))
        assert reply.said[0] == foretell(PROMPT, 1)
        assert cluster.engines["decode-0"].passes == 0
        await cluster.at_rest()


async def test_enough_for_the_client_ends_the_work():
    async with a_cluster(layer_s=0.002) as cluster:
        reply = await cluster.serve(an_ask(PROMPT, 200), Listener(enough=5))
        assert reply.said[0] == foretell(PROMPT, 5)
        assert reply.ended == {}
        passes = cluster.engines["decode-0"].passes
        await cluster.at_rest()
        assert cluster.engines["decode-0"].passes <= passes + 2


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2])
async def test_a_client_that_leaves_in_any_phase_leaves_nothing_behind(after_s: float):
    """B34: queued, in prefill, in transfer, in decode."""
    async with a_cluster(layer_s=0.004) as cluster:
        tasks = [asyncio.create_task(cluster.serve(an_ask([n, *LONG], 60))) for n in range(6)]
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        before = {name: engine.passes for name, engine in cluster.engines.items()}
        await cluster.at_rest()
        assert all(engine.passes <= before[name] + 2 for name, engine in cluster.engines.items())
        assert (await cluster.serve(an_ask(PROMPT, 6))).said[0] == foretell(PROMPT, 6)


async def test_a_decode_instance_dies_and_another_goes_on_with_the_tokens_so_far():
    async with a_cluster(decodes=2, layer_s=0.003) as cluster:
        reply = Listener()
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 40, choices=2), reply))
        async with asyncio.timeout(5):
            while len(reply.said.get(1, [])) < 6:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.005)
        busy = [instance.name for instance in cluster.view.of(Pool.DECODE) if instance.streams]
        assert len(busy) == 2, "two choices, two instances"
        await cluster.kill(busy[0])
        await task
        assert reply.said == {n: foretell(PROMPT, 40) for n in range(2)}
        assert set(reply.ended) == {0, 1}
        assert len(reply.reused) == 1
        await cluster.at_rest()


async def test_a_prefill_instance_dies_and_another_takes_over():
    async with a_cluster(prefills=2, layer_s=0.02) as cluster:
        reply = Listener()
        task = asyncio.create_task(cluster.serve(an_ask(LONG, 4), reply))
        await asyncio.sleep(0.3)
        await cluster.kill("prefill-0")
        await task
        assert reply.said[0] == foretell(LONG, 4)
        assert cluster.engines["prefill-1"].tokens_computed < len(LONG)  # stored chunks were reused
        assert cluster.counted("dango:placements_total") == 2
        assert cluster.counted("dango:replacements_total") == 1
        await cluster.at_rest()


async def test_the_only_decode_instance_dies_and_the_request_fails_once():
    async with a_cluster(layer_s=0.005) as cluster:
        reply = Listener()
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 60), reply))
        await reply.spoke.wait()
        await asyncio.sleep(0.05)
        await cluster.kill("decode-0")
        async with asyncio.timeout(5):
            with pytest.raises(Failed):
                await task
        said = reply.said[0]
        assert said == foretell(PROMPT, len(said))
        with pytest.raises(Refused, match="no decode instance"):
            await cluster.serve(an_ask(PROMPT, 6))
        cluster.start_decode("decode-0", FakeEngine())
        await cluster.ready(3)
        assert (await cluster.serve(an_ask(PROMPT, 6))).said[0] == foretell(PROMPT, 6)


async def test_a_bad_block_in_the_pool_costs_time_and_never_a_word():
    async with a_cluster(blocks=BLOCKS) as cluster:
        await cluster.serve(an_ask(LONG, 4))
        (segment,) = {p.shm for p in cluster.movers["prefill-0"]._places.values()}  # type: ignore[attr-defined]
        overwrite_first_runs(Path(segment))
        again = await cluster.serve(an_ask(LONG, 8))
        assert again.said[0] == foretell(LONG, 8)
        await cluster.at_rest()


async def test_a_full_pool_refuses_before_the_first_token_and_recovers():
    async with a_cluster(blocks=8) as cluster:
        with pytest.raises(Refused) as refused:
            await cluster.serve(an_ask(LONG, 4))
        assert (refused.value.refusal.reason, refused.value.refusal.status) == ("pool_full", 429)
        assert (await cluster.serve(an_ask(PROMPT, 6))).said[0] == foretell(PROMPT, 6)
        await cluster.at_rest()


async def test_one_too_many_in_flight_is_refused():
    async with a_cluster(layer_s=0.01, in_flight_max=1) as cluster:
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 6)))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refused:
            await cluster.serve(an_ask(PROMPT, 6))
        assert refused.value.refusal.status == 429
        assert (await task).said[0] == foretell(PROMPT, 6)
        await cluster.dispatcher.drain(0.1)
        with pytest.raises(Refused) as refused:
            await cluster.serve(an_ask(PROMPT, 6))
        assert refused.value.refusal.reason == "draining"


async def test_a_deadline_ends_the_request_and_its_work():
    async with a_cluster(layer_s=0.02) as cluster:
        with pytest.raises(Failed, match="within"):
            await cluster.serve(an_ask(LONG, 100, within_s=0.5))
        await cluster.at_rest()


async def test_tenants_and_salts_do_not_share():
    """B23: whose cache it is, is part of a block's name."""
    async with a_cluster() as cluster:
        for tenant, salt, reused in (
            ("x", "", 0),
            ("x", "", 20),
            ("y", "", 0),
            ("y", "", 20),
            ("y", "x", 0),
            ("", "", 0),
        ):
            reply = await cluster.serve(an_ask(PROMPT, 4, tenant=tenant, salt=salt))
            assert reply.said[0] == foretell(PROMPT, 4)
            assert reply.reused == [reused]


@pytest.mark.parametrize(("share", "reused"), [(0.5, 20), (1.0, 0)])
async def test_a_tenant_at_its_quota_does_not_push_out_anothers_prefix(share: float, reused: int):
    async with a_cluster(blocks=24, shares=Shares(tenant=share)) as cluster:
        await cluster.heard["decode-0"].wait()
        await cluster.serve(an_ask(PROMPT, 6, tenant="y"))
        for number in range(8):
            prompt = [number, *LONG[:30]]
            assert (await cluster.serve(an_ask(prompt, 6, tenant="x"))).said[0] == foretell(prompt, 6)
        await cluster.at_rest()
        directory = cluster.directory.get()
        assert (await directory.tenant(tenant_id("x"))).blocks <= share * 24
        assert (await cluster.serve(an_ask(prompt, 6, tenant="x"))).reused == [28], "its own latest is warm"
        assert (await cluster.serve(an_ask(PROMPT, 6, tenant="y"))).reused == [reused]
        await cluster.at_rest()


async def test_what_was_decoded_for_a_tenant_is_that_tenants():
    async with a_cluster(blocks=24, shares=Shares(tenant=0.5)) as cluster:
        await cluster.heard["decode-0"].wait()
        reply = await cluster.serve(an_ask(PROMPT, 12, tenant="x"))
        await cluster.cached((len(PROMPT) + 11) // 4)
        assert (await cluster.directory.get().tenant(tenant_id("x"))).blocks == (len(PROMPT) + 11) // 4
        turn = await cluster.serve(an_ask([*PROMPT, *reply.said[0], 5], 4, tenant="x"))
        assert turn.reused == [(len(PROMPT) + 11) // 4 * 4]
        await cluster.at_rest()


async def test_a_tenant_waits_for_its_own_room_and_nobody_for_it():
    async with a_cluster(blocks=24, layer_s=0.005, shares=Shares(tenant=0.5)) as cluster:
        with pytest.raises(Refused, match="within the tenant's quota") as refused:
            await cluster.serve(an_ask(LONG[:60], 4, tenant="x"))
        assert (refused.value.refusal.reason, refused.value.refusal.status) == ("quota", 429)
        ended: list[str] = []

        async def served(name: str, prompt: list[int]) -> None:
            assert (await cluster.serve(an_ask(prompt, 4, tenant=name))).said[0] == foretell(prompt, 4)
            ended.append(name)

        many = [served("x", [number, *LONG[:30]]) for number in range(6)]
        async with asyncio.timeout(20):
            await asyncio.gather(*many, served("y", PROMPT))
        assert "y" in ended[:3], "it did not stand behind the six"
        stats = await cluster.at_rest()
        assert stats.over_quota > 1
        assert (await cluster.directory.get().tenant(tenant_id("x"))).blocks <= 12


async def test_an_answer_whose_last_token_was_said_is_over_though_nobody_lived_to_say_so():
    """The decode instance dies between its last token and the end of its stream: not one token more."""

    class Deaf(Listener):
        async def tokens(self, choice: int, said: Tokens) -> bool:
            more = await super().tokens(choice, said)
            if len(self.said[choice]) == 8:
                await cluster.kill("decode-0")
            return more

    async with a_cluster(decodes=2, layer_s=0.002) as cluster:
        cluster.view.enter(cluster.view.of(Pool.DECODE)[1], (RequestId("elsewhere"), 0), Stream(10**6, 0.0))
        reply = await cluster.serve(an_ask(PROMPT, 8), Deaf())
        assert reply.said[0] == foretell(PROMPT, 8)
        assert reply.ended == {0: EndReason.LENGTH}
        cluster.view.release(cluster.view.of(Pool.DECODE)[0], (RequestId("elsewhere"), 0), 0.0)


async def test_runs_of_steps_tell_the_same_text_a_stop_string_included():
    async with a_cluster(steps_max=16) as cluster:
        reply = await cluster.serve(an_ask(PROMPT, 30))
        assert reply.said[0] == foretell(PROMPT, 30)
        short = await cluster.serve(an_ask(PROMPT, 30), Listener(enough=7))
        assert short.said[0] == foretell(PROMPT, 30)[: len(short.said[0])]
        assert short.ended == {}
        await cluster.at_rest()


async def test_what_still_runs_when_the_time_to_drain_is_over_is_told_why():
    async with a_cluster(layer_s=0.005) as cluster:
        reply = Listener()
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 200), reply))
        await reply.spoke.wait()
        draining = asyncio.create_task(cluster.dispatcher.drain(0.1))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="shutting down"):
            await cluster.serve(an_ask(PROMPT, 4))
        with pytest.raises(Failed, match="shutting down"):
            await task
        await draining
        await cluster.at_rest()


async def test_a_directory_that_comes_and_goes_costs_written_back_blocks_and_no_instance():
    async with a_cluster(layer_s=0.001) as cluster:
        await cluster.heard["decode-0"].wait()
        for turn in range(4):
            task = asyncio.create_task(cluster.serve(an_ask([turn, *PROMPT], 60)))
            for _ in range(6):
                await asyncio.sleep(0.03)
                link = cluster.links["decode-0"]
                address = link.address
                await link.follow(None)
                await asyncio.sleep(0.005)
                await link.follow(address)
            assert (await task).said[0] == foretell([turn, *PROMPT], 60)
        assert not cluster.tasks["decode-0"].done()


async def test_draining_passes_over_a_request_whose_deadline_is_ending_it_already():
    async with a_cluster(layer_s=0.02) as cluster:
        task = asyncio.create_task(cluster.serve(an_ask(LONG, 200, within_s=0.3)))
        await asyncio.sleep(0.1)
        (timeout,) = cluster.dispatcher._timeouts
        async with asyncio.timeout(5):
            while not timeout.expired():  # noqa: ASYNC110 - the moment is between two turns of the loop
                await asyncio.sleep(0)
        await cluster.dispatcher.drain(0.0)
        with pytest.raises(Failed):
            await task


class Failing:
    """A method of the directory's client that fails so many times, as if no answer came in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
        whole = getattr(Directory, name)
        self.left = times

        async def failing(directory: Directory, *arguments: object) -> object:
            if self.left:
                self.left -= 1
                raise DeadlineExceeded("the directory said nothing")
            return await whole(directory, *arguments)

        monkeypatch.setattr(Directory, name, failing)


async def test_a_lookup_without_an_answer_makes_a_prompt_cold_and_fails_nobody(monkeypatch: pytest.MonkeyPatch):
    async with a_cluster() as cluster:
        assert (await cluster.serve(an_ask(PROMPT))).reused == [0]
        Failing(monkeypatch, "lookup", 1)
        reply = await cluster.serve(an_ask(PROMPT))
        assert (reply.said[0], reply.reused) == (foretell(PROMPT, 8), [0])
        assert cluster.counted("dango:replacements_total") == 0
        assert (await cluster.serve(an_ask(PROMPT))).reused == [20]


async def test_a_call_to_the_directory_that_takes_too_long_is_not_the_requests_own_deadline(
    monkeypatch: pytest.MonkeyPatch,
):
    async with a_cluster() as cluster:
        directory = Failing(monkeypatch, "acquire", 1)
        assert (await cluster.serve(an_ask(PROMPT))).said[0] == foretell(PROMPT, 8)
        directory.left = 10**9
        with pytest.raises(Failed, match="lost an instance"):
            await cluster.serve(an_ask(PROMPT))
        await cluster.at_rest()


async def test_choices_that_are_placed_again_are_not_judged_one_by_one(monkeypatch: pytest.MonkeyPatch):
    judged, whole = [], Admission.admit

    async def admit(admission: Admission, wanted: Wanted, lookup: Lookup) -> Admitted:
        judged.append((wanted.choices, wanted.promised))
        return await whole(admission, wanted, lookup)

    monkeypatch.setattr(Admission, "admit", admit)
    async with a_cluster() as cluster:
        Failing(monkeypatch, "acquire", 1)
        reply = await cluster.serve(an_ask(PROMPT, choices=2))
        assert reply.said == {choice: foretell(PROMPT, 8) for choice in range(2)}
    assert judged == [([0, 1], False), ([0], True), ([1], True)]


async def test_when_one_choice_is_refused_in_decode_another_that_needs_none_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    config = ConductorConfig(block_tokens=LAYOUT.block_tokens, admission="at_decode")
    async with a_cluster(config=config) as cluster:

        def refuses(candidate: Candidate, *_: object) -> Judgement:
            return Judgement(Verdict.REFUSE, None, candidate.limits, 0.0, reason="tbt")

        monkeypatch.setattr(Gate, "hand_over", lambda _, *arguments: refuses(*arguments))
        reply, long, short = Listener(), Sampling(seed=0, max_tokens=8), Sampling(seed=1, max_tokens=1)
        with pytest.raises(Refused):
            await cluster.serve(replace(an_ask(PROMPT), samplings=[long, short]), reply)
        assert not reply.said
        await cluster.serve(replace(an_ask(PROMPT), samplings=[short, long]), reply)
        assert set(reply.ended) == {0, 1}, "one that has spoken is a promise to the others"
        await cluster.at_rest()


async def test_no_connection_is_made_to_an_instance_that_was_given_up_meanwhile():
    async with a_cluster() as cluster:
        (instance,) = cluster.view.of(Pool.DECODE)
        cluster.view.give_up(instance)
        with pytest.raises(PeerLost, match="given up"):
            cluster.dispatcher._peer(instance)


async def test_an_answer_that_decode_has_no_place_for_is_not_told_that_an_instance_was_lost():
    async with a_cluster() as cluster:
        with pytest.raises(Failed, match="could not go on: the decode queue is full"):
            await cluster.serve(an_ask(PROMPT, choices=DecodeConfig.queue_max + 1))
        await cluster.at_rest()
