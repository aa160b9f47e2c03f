"""B42 over HTTP, with the real services behind: one answer for each request, streamed or not, though an instance
fails all that it is given; and one error when all do."""

import json
from collections.abc import Sequence

import pytest

from conductor.health import FAILURES_MAX
from engine.api import Row
from engine.tokenizer import Tokenizer
from tests.cluster import Cluster, a_cluster
from tests.conductor.edge import Edge, an_edge_over
from tests.fakes import MANIFEST, FakeEngine, FakePass


class Legible(FakeEngine):
    """Draws only tokens that the tokenizer knows."""

    def drawn(self, row: Row) -> int:
        return 10 + super().drawn(row) % 200


class Broken(Legible):
    begun = 0

    def begin(self, rows: Sequence[Row]) -> FakePass:
        self.begun += 1
        raise RuntimeError("this machine is broken")


def over(cluster: Cluster, tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    return an_edge_over(cluster.dispatcher, tokenizer, MANIFEST, cluster.metrics)


async def text_of(edge: Edge, prompt: str, *, stream: bool) -> str:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
    if not stream:
        status, answer = await edge.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]
    *events, done = await edge.events("/v1/completions", body)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_each_request_has_one_answer_though_an_instance_fails_all(tokenizer: Tokenizer):
    async with a_cluster(prefills=0, decodes=0) as cluster:
        broken = Broken()
        cluster.start_prefill("prefill-0", broken)
        cluster.start_prefill("prefill-1", Legible())
        cluster.start_decode("decode-0", Legible())
        await cluster.ready(4)
        async with over(cluster, tokenizer) as edge:
            for number in range(2 * FAILURES_MAX):
                prompt = f"{number} dumplings on one skewer"
                streamed = await text_of(edge, prompt, stream=True)
                assert streamed == await text_of(edge, prompt, stream=False)
        assert broken.begun == FAILURES_MAX
        assert cluster.counted("dango:replacements_total") == FAILURES_MAX
        await cluster.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_when_all_fail_there_is_one_error_after_two_attempts(tokenizer: Tokenizer, stream: bool):
    async with a_cluster(prefills=0, decodes=0) as cluster:
        engines = [Broken(), Broken()]
        for number, engine in enumerate(engines):
            cluster.start_prefill(f"prefill-{number}", engine)
        cluster.start_decode("decode-0", Legible())
        await cluster.ready(4)
        async with over(cluster, tokenizer) as edge:
            status, answer = await edge.post("/v1/completions", {"prompt": "one", "stream": stream})
        assert (status, answer["error"]["code"]) == (503, "request_failed")
        assert [engine.begun for engine in engines] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompts_lower_nobodys_state(tokenizer: Tokenizer, stream: bool):
    async with a_cluster(prefills=0, decodes=0) as cluster:
        cluster.start_prefill("prefill-0", Legible())
        cluster.start_decode("decode-0", Legible())
        await cluster.ready(3)
        async with over(cluster, tokenizer) as edge:
            for _ in range(50):
                body = {"prompt": "dumplings " * MANIFEST.context_tokens, "stream": stream}
                status, answer = await edge.post("/v1/completions", body)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert not cluster.view.health
            assert await text_of(edge, "one", stream=stream)
