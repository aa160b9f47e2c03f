"""The gateway's answers, on real sockets: whole and streamed, with the `openai` client as it is."""

import asyncio
import json
import math
import random
from typing import Any

import openai
import pytest

from conductor.ask import Failed, Limits, Priority, Refusal, Refused
from engine.tokenizer import Tokenizer
from protocol.ids import token_ids
from tests.conductor.edge import CONTEXT, MODEL, an_edge, deltas, texts
from tests.conductor.scripted import Play

HELLO: Any = [{"role": "user", "content": "hello"}]
SENTENCE = "The block has a name: Größe 東京 👋🏽."


async def test_chat_with_the_openai_client(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode(SENTENCE, special=False)
    async with an_edge(tokenizer, Play(words, reused=3)) as edge, edge.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=len(words))
    prompt = len(tokenizer.chat(HELLO))
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.content == SENTENCE
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len(words)
    assert answer.usage.total_tokens == prompt + len(words)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_chat_stream_has_one_chunk_for_each_token_and_one_end(tokenizer: Tokenizer) -> None:
    """B12 (a)"""
    words = tokenizer.encode(SENTENCE, special=False)
    async with an_edge(tokenizer, Play(words)) as edge, edge.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=len(words), stream=True
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks]
    assert len(chunks) == len(words) + 1
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * len(words)
    assert "".join(choice.delta.content or "" for choice in choices) == SENTENCE
    assert [choice.finish_reason for choice in choices] == [None] * len(words) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_with_the_openai_client(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode(SENTENCE, special=False)
    async with an_edge(tokenizer, Play(words)) as edge, edge.client() as client:
        ask: dict[str, Any] = {"model": MODEL, "prompt": "once", "max_tokens": len(words)}
        whole = await client.completions.create(**ask)
        stream = await client.completions.create(**ask, stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.id.startswith("cmpl-")
    assert whole.object == "text_completion"
    assert whole.choices[0].text == SENTENCE == "".join(chunk.choices[0].text for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(words) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_is_an_ask_and_choices_come_in_order(tokenizer: Tokenizer, stream: bool) -> None:
    async with an_edge(tokenizer, Play([40, 41], reused=1)) as edge:
        ask = {"prompt": ["once", "twice"], "n": 2, "max_tokens": 3, "seed": 5}
        if stream:
            found = deltas(await edge.events("/v1/completions", ask))
            indices = sorted({choice["index"] for choice in found})
            assert sum(choice["finish_reason"] == "length" for choice in found) == 4
        else:
            _, answer = await edge.post("/v1/completions", ask)
            indices = [choice["index"] for choice in answer["choices"]]
            assert answer["usage"]["completion_tokens"] == 12
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        asks = edge.serve.asks
    assert indices == [0, 1, 2, 3]
    assert [ask.prompt for ask in asks] == [token_ids(edge.ids(text)) for text in ("once", "twice")]
    assert [[sampling.seed for sampling in ask.samplings] for ask in asks] == [[5, 6], [5, 6]]
    assert len({ask.request for ask in asks}) == 2


async def test_token_id_prompts_reach_the_dispatcher_as_they_are(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge:
        await edge.complete(prompt=[1, 2, 3], max_tokens=1)
        await edge.complete(prompt=[[1, 2], [3]], max_tokens=1)
        assert [list(ask.prompt) for ask in edge.serve.asks] == [[1, 2, 3], [1, 2], [3]]


async def test_without_a_seed_each_choice_draws_another(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge:
        for _ in range(2):
            await edge.chat(n=2, max_tokens=1)
        seeds = [sampling.seed for ask in edge.serve.asks for sampling in ask.samplings]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_fields_become_the_sampling(tokenizer: Tokenizer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "min_tokens": 2}
    penalties = {"presence_penalty": 0.3, "frequency_penalty": -0.3, "repetition_penalty": 1.2}
    async with an_edge(tokenizer) as edge:
        await edge.chat(**fields, **penalties, max_tokens=4, stop_token_ids=[300], cache_salt="s")
        await edge.chat(ignore_eos=True, max_completion_tokens=4)
        first, second = (ask.samplings[0] for ask in edge.serve.asks)
        assert edge.serve.asks[0].salt == "s"
    assert {name: getattr(first, name) for name in (fields | penalties)} == fields | penalties
    assert first.stop_tokens == sorted({*tokenizer.stop_tokens, 300})
    assert (second.temperature, second.stop_tokens, second.max_tokens) == (1.0, [], 4)


# --- usage


async def test_usage_is_streamed_only_when_asked(tokenizer: Tokenizer) -> None:
    """B11"""
    async with an_edge(tokenizer, Play(reused=1)) as edge:
        for options in (None, {}, {"include_usage": False}):
            chunks = [
                json.loads(event) for event in (await edge.chat_events(max_tokens=2, stream_options=options))[:-1]
            ]
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        events = await edge.chat_events(max_tokens=2, stream_options={"include_usage": True})
        _, whole = await edge.chat(max_tokens=2)
    chunks = [json.loads(event) for event in events[:-1]]
    assert [bool(chunk["choices"]) for chunk in chunks] == [True, True, True, False]
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


async def test_usage_can_come_with_every_chunk(tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with an_edge(tokenizer) as edge:
        events = await edge.chat_events(max_tokens=2, stream_options=options)
    assert [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 2, 2]


# --- text


async def test_streamed_text_is_the_unstreamed_text_whatever_the_bytes(tokenizer: Tokenizer) -> None:
    """B08: 20 answers of random tokens, many of them cut within a character."""
    dice = random.Random(8)
    async with an_edge(tokenizer) as edge:
        for _ in range(20):
            tokens = [dice.randrange(3, 512) for _ in range(40)]
            edge.serve.play = Play(tokens)
            _, whole = await edge.chat(max_tokens=40)
            events = await edge.chat_events(max_tokens=40)
            assert texts(events) == whole["choices"][0]["message"]["content"] == tokenizer.decode(tokens)
            assert len(deltas(events)) == 41


@pytest.mark.parametrize("stop", ["is", "block ha", "name:\n", ["zzz", "me:", "ame"], ["The block", "Th"]])
async def test_a_stop_string_ends_the_text_before_it(tokenizer: Tokenizer, stop: Any) -> None:
    """B09"""
    text = "This block has a name:\nthe first of this list. The block is a run."
    tokens = tokenizer.encode(text, special=False)
    ends = [at for one in ([stop] if isinstance(stop, str) else stop) if (at := text.find(one)) >= 0]
    async with an_edge(tokenizer, Play(tokens)) as edge:
        _, whole = await edge.chat(stop=stop, max_tokens=len(tokens))
        events = await edge.chat_events(stop=stop, max_tokens=len(tokens))
        await edge.serve.idle()
    choice = whole["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text[: min(ends)], "stop")
    assert texts(events) == text[: min(ends)]
    assert [one["finish_reason"] for one in deltas(events) if one["finish_reason"]] == ["stop"]
    assert whole["usage"]["completion_tokens"] < len(tokens)


async def test_what_may_begin_a_stop_string_is_shown_when_nothing_more_comes(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("see you", special=False)
    async with an_edge(tokenizer, Play(tokens)) as edge:
        events = await edge.chat_events(stop="you all", max_tokens=len(tokens))
    assert texts(events) == "see you"
    assert deltas(events)[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stop_token_ids", [None, [45]])
async def test_the_token_that_ends_the_answer_counts_and_is_not_shown(
    tokenizer: Tokenizer, stop_token_ids: list[int] | None
) -> None:
    last = stop_token_ids[0] if stop_token_ids else min(tokenizer.stop_tokens)
    async with an_edge(tokenizer, Play([40, 41, last])) as edge:
        _, answer = await edge.chat(stop_token_ids=stop_token_ids, logprobs=True)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == tokenizer.decode([40, 41])
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3
    assert [bool(entry["bytes"]) for entry in choice["logprobs"]["content"]] == [True, True, False]


# --- logprobs


@pytest.mark.parametrize("top", [0, 5, 20])
async def test_logprobs_are_finite_and_rebuild_the_text(tokenizer: Tokenizer, top: int) -> None:
    """B20"""
    tokens = tokenizer.encode("東京 👋🏽 now", special=False)
    likely = [(40 + rank, float("-inf") if rank else 0.1) for rank in range(20)]
    async with an_edge(tokenizer, Play(tokens, top=likely, logprob=float("nan"))) as edge:
        ask = {"logprobs": True, "top_logprobs": top, "max_tokens": len(tokens)}
        _, whole = await edge.chat(**ask)
        streamed = [choice["logprobs"] for choice in deltas(await edge.chat_events(**ask))]
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(tokens)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "東京 👋🏽 now"
    assert all(len(entry["top_logprobs"]) == top for entry in entries)
    assert all(-9999 <= one["logprob"] <= 0 for entry in entries for one in [entry, *entry["top_logprobs"]])
    assert [entry for logprobs in streamed[:-1] for entry in logprobs["content"]] == entries
    assert streamed[-1] is None


async def test_completion_logprobs_come_in_columns(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ö now", special=False)
    async with an_edge(tokenizer, Play(tokens, top=[(tokens[0], -0.5), (41, -1.0)])) as edge:
        _, answer = await edge.complete(logprobs=2, max_tokens=len(tokens))
        _, bare = await edge.complete(max_tokens=len(tokens))
        status, error = await edge.complete(logprobs=21)
    columns = answer["choices"][0]["logprobs"]
    assert {len(column) for column in columns.values()} == {len(tokens)}
    assert columns["token_logprobs"] == [-0.5] * len(tokens)
    assert all(token in top for token, top in zip(columns["tokens"], columns["top_logprobs"], strict=True))
    assert columns["text_offset"][0] == 0
    assert columns["text_offset"] == sorted(columns["text_offset"])
    assert bare["choices"][0]["logprobs"] is None
    assert (status, error["error"]["param"]) == (400, "logprobs")


# --- refusals and failures


@pytest.mark.parametrize(("status", "kind"), [(429, "overloaded_error"), (503, "service_unavailable")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_status_and_says_when_to_come_back(
    tokenizer: Tokenizer, status: int, kind: str, stream: bool
) -> None:
    error = Refused(Refusal("queue_full", "all is taken", 2.2, status))
    async with (
        an_edge(tokenizer, Play(error=error)) as edge,
        edge.http.post(edge.url + "/v1/chat/completions", json={"messages": HELLO, "stream": stream}) as response,
    ):
        assert response.status == status
        assert response.headers["Retry-After"] == "3"
        body = {"message": "all is taken", "type": kind, "param": None, "code": "queue_full"}
        ours = {"reason": "queue_full", "retry_after_s": 2.2}
        assert await response.json() == {"error": body | {"dango": ours}}


TOO_LATE = Refused(
    Refusal("ttft", "The prefill pool is busy.", 7.0, 429, ttft_s=41.24, tbt_s=0.0312, limits=Limits(30.0, 0.5))
)


async def test_the_openai_client_sees_a_rate_limit_with_the_prediction(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, Play(error=TOO_LATE)) as edge, edge.client() as client:
        with pytest.raises(openai.RateLimitError, match=r"predicted after 41\.2 s; the limit is 30 s") as caught:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.response.headers["Retry-After"] == "7"
    assert caught.value.code == "ttft"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["dango"] == {
        "reason": "ttft",
        "predicted_ttft_s": 41.24,
        "predicted_tbt_s": 0.0312,
        "ttft_limit_s": 30.0,
        "tbt_limit_s": 0.5,
        "retry_after_s": 7.0,
    }


async def test_the_openai_client_comes_back_when_it_was_told(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []
    async with an_edge(tokenizer, Play(error=TOO_LATE)) as edge, edge.client() as client:

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            edge.serve.play.error = None

        monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
        again = client.with_options(max_retries=1)
        answer = await again.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert slept == [7.0]
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_status_of_refusals_by_load_can_be_chosen(tokenizer: Tokenizer, stream: bool) -> None:
    async with an_edge(tokenizer, Play(error=TOO_LATE), refusal_status=503) as edge:
        status, answer = await edge.chat(stream=stream)
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "overloaded_error", "ttft")


# --- classes and limits


async def test_class_and_limits_reach_the_dispatcher(tokenizer: Tokenizer) -> None:
    headers = {"X-Dango-Ttft-Limit-S": "3", "x-dango-tbt-limit-s": "0.25"}
    async with an_edge(tokenizer, tbt_limit_s=0.0, batch_ttft_limit_s=90.0) as edge:
        await edge.chat(max_tokens=1)
        await edge.chat(max_tokens=1, service_tier="flex")
        await edge.complete(max_tokens=1, prompt=["a", "b"], priority=1, tbt_limit_s=2)
        await edge.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "ttft_limit_s": 5.5}, **headers)
        found = [(ask.priority, ask.limits) for ask in edge.serve.asks]
    assert found == [
        (Priority.INTERACTIVE, Limits(30.0, math.inf)),
        (Priority.BATCH, Limits(90.0, 1.0)),
        *[(Priority.BATCH, Limits(90.0, 2.0))] * 2,
        (Priority.INTERACTIVE, Limits(5.5, 0.25)),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_limit_in_a_header_is_refused_by_its_name(tokenizer: Tokenizer, stream: bool) -> None:
    body = {"prompt": "x", "stream": stream}
    async with an_edge(tokenizer) as edge:
        status, answer = await edge.post("/v1/completions", body, **{"X-Dango-Ttft-Limit-S": "soon"})
        assert edge.serve.asks == []
    assert (status, answer["error"]["param"]) == (400, "X-Dango-Ttft-Limit-S")


async def test_the_answer_names_the_tier_that_the_request_named(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge, edge.client() as client:
        for asked, told in (("auto", "default"), ("priority", "default"), ("flex", "flex")):
            ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "service_tier": asked}
            answer = await client.chat.completions.create(**ask)
            stream = await client.chat.completions.create(**ask, stream=True)
            assert answer.service_tier == told
            assert [chunk.service_tier async for chunk in stream] == [told] * 3
        _, bare = await edge.chat(max_tokens=1, priority=1)
    assert "service_tier" not in bare


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(tokenizer: Tokenizer, stream: bool) -> None:
    async with an_edge(tokenizer, Play(error=Failed("decode-0 died"))) as edge:
        status, answer = await edge.chat(stream=stream)
    assert (status, answer["error"]["message"], answer["error"]["type"]) == (503, "decode-0 died", "server_error")


async def test_a_failure_in_a_stream_is_its_last_event(tokenizer: Tokenizer) -> None:
    """B12 (b, d): no finish reason and no [DONE] may make it look whole."""
    async with an_edge(tokenizer, Play(error=Failed("decode-0 died"), error_after=2)) as edge:
        events = await edge.chat_events()
        status, _ = await edge.chat()
        async with edge.client() as client:
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            with pytest.raises(openai.APIError, match="decode-0 died"):
                async for _ in stream:
                    pass
    assert [json.loads(event).keys() >= {"error"} for event in events] == [False, False, True]
    assert not any(choice["finish_reason"] for choice in deltas(events))
    assert status == 503


@pytest.mark.parametrize("after", [0, 2])
async def test_a_mistake_of_ours_shows_nothing_of_itself(tokenizer: Tokenizer, after: int) -> None:
    async with an_edge(tokenizer, Play(error=KeyError("secret"), error_after=after)) as edge:
        status, answer = await edge.chat()
        if after:
            streamed = json.loads((await edge.chat_events())[-1])
        else:
            _, streamed = await edge.chat(stream=True)
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert answer == streamed
    assert "secret" not in json.dumps(answer)


async def test_the_gateway_ends_what_the_dispatcher_does_not(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, Play(first_s=30), request_s=0.1) as edge:
        status, answer = await edge.chat()
        assert 0 < edge.serve.asks[0].within_s <= 0.1
        await edge.serve.idle()
    assert (status, answer["error"]["code"]) == (503, "request_failed")


async def test_one_refused_prompt_ends_its_siblings(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, Play(first_s=0.05, error=Refused(Refusal("no_decode", "none", 1)))) as edge:
        status, _ = await edge.complete(prompt=["a", "b", "c"])
        await edge.serve.idle()
    assert status == 503


async def test_a_silent_stream_gets_comments_and_then_errors_come_in_band(tokenizer: Tokenizer) -> None:
    """B12 (e)"""
    async with an_edge(tokenizer, Play(first_s=0.3, error=Failed("gone")), keep_alive_s=0.05) as edge:
        body = {"messages": HELLO, "stream": True}
        async with edge.http.post(edge.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            blocks = (await response.text()).split("\n\n")
    assert blocks[:3] == [": keep-alive"] * 3
    assert json.loads(blocks[-2].removeprefix("data: "))["error"]["message"] == "gone"


# --- the other endpoints


async def test_the_model_is_listed_and_found(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge, edge.client() as client:
        listed = (await client.models.list()).data
        found = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")
    assert [model.id for model in listed] == [MODEL] == [found.id]
    assert listed[0].to_dict()["max_model_len"] == CONTEXT


async def test_health_is_about_the_process_and_ready_about_the_pools(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge:
        for missing, status in (([], 200), (["no decode instance"], 503)):
            edge.serve.missing = missing
            async with edge.http.get(edge.url + "/ready") as response:
                assert response.status == status
                assert await response.json() == {"ready": not missing, "missing": missing, "degraded": []}
            async with edge.http.get(edge.url + "/health") as response:
                assert response.status == 200


async def test_the_version_is_told(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge, edge.http.get(edge.url + "/version") as response:
        assert (await response.json())["version"]


@pytest.mark.parametrize(
    ("given", "echo"), [("run-1.a:b", "run-1.a:b"), ("a b/<c>", "abc"), ("x" * 500, "x" * 128)]
)
async def test_a_request_id_is_cleaned_and_echoed(tokenizer: Tokenizer, given: str, echo: str) -> None:
    async with an_edge(tokenizer) as edge:
        for _ in range(2):
            body = {"messages": HELLO, "max_tokens": 1}
            url, headers = edge.url + "/v1/chat/completions", {"X-Request-Id": given}
            async with edge.http.post(url, json=body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == echo
        names = [ask.request for ask in edge.serve.asks]
    assert len(set(names)) == 2
    assert all(name.startswith(echo) for name in names)


async def test_without_a_request_id_the_answer_brings_one(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer) as edge, edge.http.get(edge.url + "/health") as response:
        assert len(response.headers["X-Request-Id"]) == 16


async def test_many_requests_side_by_side_do_not_mix(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, Play(gap_s=0.001)) as edge:
        lengths = range(1, 33)
        answers = await asyncio.gather(*(edge.chat(max_tokens=length) for length in lengths))
    assert [answer["usage"]["completion_tokens"] for _, answer in answers] == list(lengths)
