"""What a client makes of a stream."""

import json

import pytest

from bench.client import Refused, Seen, StreamFailed, _reason, read_stream, session, steady_tpot_s, stream_answer
from tests.bench.endpoint import an_endpoint, lines


def timed(texts: list[bytes], every_s: float = 1.0, first_s: float = 10.0) -> list[tuple[float, bytes]]:
    return [(first_s + every_s * n, text + b"\n") for n, text in enumerate(texts)]


def test_tokens_are_timed_and_the_usage_is_read() -> None:
    seen = read_stream(8.0, timed(lines(3, prompt=20, cached=16)), tokens=3)
    assert seen == Seen(8.0, [10.0, 11.0, 12.0], 20, 16)
    assert (seen.ttft_s, seen.tpot_s) == (2.0, 1.0)


def test_a_single_token_has_no_time_between_tokens() -> None:
    assert read_stream(8.0, timed(lines(1, prompt=20)), tokens=1).tpot_s is None


def test_comments_and_empty_lines_are_no_tokens() -> None:
    noise = [b": keep-alive", b"", *lines(2, prompt=4)]
    assert read_stream(0.0, timed(noise), tokens=2).tokens_at == [12.0, 13.0]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([], "broke off"),
        (lines(2, prompt=4)[:-1], "broke off"),
        (lines(3, prompt=4), "2 tokens wanted, 3 events"),
        (lines(2, prompt=4)[1:], "2 tokens wanted, 1 events"),
        ([b"data: " + json.dumps({"error": {"message": "no"}}).encode(), b"data: [DONE]"], "an error"),
    ],
)
def test_a_stream_that_is_not_as_it_must_be_fails(texts: list[bytes], reason: str) -> None:
    with pytest.raises(StreamFailed, match=reason):
        read_stream(0.0, timed(texts), tokens=2)


def test_steady_time_between_tokens_of_one_stream_is_its_own() -> None:
    seen = Seen(0.0, [1.0, 4.0, 5.0], 1, 0)
    assert steady_tpot_s([seen]) == seen.tpot_s == 2.0


def test_steady_time_counts_only_while_all_run() -> None:
    early = Seen(0.0, [1.0, 1.1, 1.2, 10.0, 12.0, 14.0], 1, 0)  # fast while it was alone
    late = Seen(0.0, [10.0, 12.0, 14.0, 14.1, 14.2], 1, 0)  # and fast when it was alone again
    assert steady_tpot_s([early, late]) == 2.0


def test_streams_that_did_not_meet_have_no_steady_time() -> None:
    with pytest.raises(StreamFailed, match="side by side"):
        steady_tpot_s([Seen(0.0, [1.0, 2.0], 1, 0), Seen(0.0, [3.0, 4.0], 1, 0)])


async def test_an_answer_is_asked_for_in_full_and_timed() -> None:
    async with an_endpoint() as endpoint, session() as http:
        seen = await stream_answer(http, endpoint.url, [5, 6, 7], 4)
    assert len(seen.tokens_at) == 4
    assert seen.prompt_tokens == 3
    assert seen.ttft_s > 0
    body = endpoint.bodies[0]
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (4, 0, True, True)


async def test_more_can_be_asked_for() -> None:
    async with an_endpoint() as endpoint, session() as http:
        await stream_answer(http, endpoint.url, [5], 1, ttft_limit_s=2.5)
    assert endpoint.bodies[0]["ttft_limit_s"] == 2.5


async def test_a_refusal_is_told() -> None:
    async with an_endpoint(0) as endpoint, session() as http:
        with pytest.raises(Refused, match="HTTP 429: full"):
            await stream_answer(http, endpoint.url, [1], 1)


def test_a_refusal_is_told_by_its_reason() -> None:
    assert _reason('{"error": {"code": "ttft"}}') == "ttft"
    assert _reason("[]") == "HTTP 429: []"


async def test_a_service_that_is_not_there_is_a_failure() -> None:
    async with an_endpoint() as endpoint:
        pass
    async with session() as http:
        with pytest.raises(StreamFailed, match="ClientConnectorError"):
            await stream_answer(http, endpoint.url, [1], 1)
