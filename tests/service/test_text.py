"""What a client reads: streamed as unstreamed, up to the stop, with the right ending and the right counts."""

from itertools import pairwise
from typing import Any

import pytest

from tests.service.client import cached, text_of
from tests.service.processes import Service

pytestmark = pytest.mark.cluster

PROMPT = list(range(20, 60))
SEEDS = range(25)
BLOCK = 16


def test_streamed_text_is_the_unstreamed_text_at_any_temperature(service: Service) -> None:
    """B08: at 1.8 the tiny model draws bytes that are cut in mid-character, or are no characters at all."""
    broken = 0
    for seed in SEEDS:
        ask: dict[str, Any] = {"prompt": PROMPT, "tokens": 64, "temperature": 1.8, "seed": seed}
        whole = service.client.complete(**ask)
        streamed = service.client.streamed(**ask, stream_options={"include_usage": True})
        assert streamed.text == text_of(whole)
        assert streamed.usage is not None
        assert streamed.usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 64
        assert streamed.reason == whole["choices"][0]["finish_reason"] == "length"
        broken += "\N{REPLACEMENT CHARACTER}" in streamed.text
    assert broken > len(SEEDS) / 2, "the seeds no longer test what they are for"


@pytest.fixture(scope="module")
def greedy(service: Service) -> str:
    """The text to cut: long, and with characters that can be told apart."""
    text = text_of(service.client.complete(PROMPT, 200))
    assert len(text) >= 120
    return text


@pytest.mark.parametrize("size", [1, 3, 7, 15])
@pytest.mark.parametrize("at", [5, 31, 64, 101])
def test_a_stop_string_ends_the_text_before_it(service: Service, greedy: str, at: int, size: int) -> None:
    """B09: also where it is spread over several tokens."""
    stop = greedy[at : at + size]
    expected = greedy[: greedy.index(stop)]
    whole = service.client.complete(PROMPT, 200, stop=stop)
    assert text_of(whole) == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    streamed = service.client.streamed(PROMPT, 200, stop=stop)
    assert (streamed.text, streamed.reason) == (expected, "stop")


def test_of_several_stops_the_earliest_match_counts(service: Service, greedy: str) -> None:
    """B09: one contains another, two overlap, one never comes."""
    stops = [greedy[80:95], greedy[84:87], greedy[82:90], "never in the text"]
    expected = greedy[: min(greedy.index(stop) for stop in stops[:3])]
    assert text_of(service.client.complete(PROMPT, 200, stop=stops)) == expected
    assert service.client.streamed(PROMPT, 200, stop=stops).text == expected


def test_usage_comes_when_it_is_asked_for(service: Service) -> None:
    """B11"""
    for fields in ({}, {"stream_options": {"include_usage": False}}):
        streamed = service.client.streamed(PROMPT, 4, **fields)
        assert streamed.usage is None
        assert all("usage" not in chunk or chunk["usage"] is None for chunk in streamed.chunks)
    streamed = service.client.streamed(PROMPT, 4, stream_options={"include_usage": True})
    assert streamed.usage is not None
    assert streamed.usage["prompt_tokens"] == len(PROMPT)
    assert streamed.usage["total_tokens"] == len(PROMPT) + streamed.usage["completion_tokens"]


@pytest.mark.parametrize("length", [5 * BLOCK, 5 * BLOCK + 1, 5 * BLOCK + 7])
def test_cached_tokens_are_what_was_reused(service: Service, length: int) -> None:
    """B11: none when cold; when warm whole blocks, and never the last token; streamed or not."""
    prompt = [length, *range(100, 100 + length - 1)]
    cold = service.client.complete(prompt, 2)
    service.client.at_rest()  # a decode instance that computed all of it stores it after its answer
    warm = service.client.complete(prompt, 2)
    streamed = service.client.streamed(prompt, 2, stream_options={"include_usage": True})
    reused = (length - 1) // BLOCK * BLOCK
    assert (cached(cold), cached(warm)) == (0, reused)
    assert streamed.usage == warm["usage"]


def test_a_stream_ends_once(service: Service) -> None:
    """B12: a chunk with the reason, then the end mark, then nothing; and no two chunks with a reason."""
    streamed = service.client.streamed(PROMPT, 9)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in streamed.chunks]
    assert [reason for reason in reasons if reason] == ["length"]
    assert all(before["id"] == after["id"] for before, after in pairwise(streamed.chunks))
