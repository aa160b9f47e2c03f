"""Instances killed in mid-stream: the client reads one whole answer, or hears of one error."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcache_pool.api import LEASE_S
from kvcache_pool.leases import QUARANTINE_S
from tests.engine.referee import a_prompt
from tests.service.client import text_of
from tests.service.processes import READY_S, Service, until

pytestmark = pytest.mark.cluster

TOKENS = 120
LEASES_S = LEASE_S + QUARANTINE_S + 10.0
"""What an instance had reserved for what it computed, and did not come to commit, is free again by then."""

BROKEN_OFF_S = 5.0


@pytest.fixture(scope="module")
def pair(deep: Path) -> Iterator[Service]:
    """Two prefill and two decode instances."""
    with Service(deep, "--dtype", "float32", "--threads", "1", "--prefill", "2", "--decode", "2") as service:
        yield service


def ready(service: Service, **instances: int) -> None:
    """So many instances of a pool are alive."""

    def all_there() -> bool:
        metrics = service.client.metrics()
        return all(metrics[f"dango:instances_up/{pool}"] == count for pool, count in instances.items())

    until(all_there, READY_S)
    until(service.client.ready, READY_S)


def test_another_decode_instance_goes_on_with_the_same_text(pair: Service) -> None:
    """B12: the client sees a pause; no token comes twice, or changed."""
    prompt = a_prompt(50, seed=1)
    alone = pair.client.streamed(prompt, TOKENS).text
    stream = pair.client.events(pair.client.body(prompt, TOKENS, stream=True))
    heard = [next(stream) for _ in range(10)]
    pair.kill(pair.busiest("decode"))
    *rest, end = stream
    assert end is None
    chunks = heard + rest
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "length"
    ]
    ready(pair, decode=2)
    assert text_of(pair.client.complete(prompt, TOKENS)) == alone
    pair.client.at_rest(LEASES_S)


def test_every_decode_instance_dies_and_each_stream_ends_once(pair: Service) -> None:
    """B12: one error event, no end mark, within seconds; then service again, without anybody's help."""
    streams = [
        pair.client.events(pair.client.body(a_prompt(50, seed=seed), 1000, stream=True)) for seed in range(3)
    ]
    for stream in streams:
        assert next(stream)["choices"]
    pair.kill("decode-0", "decode-1")
    killed = time.monotonic()
    for stream in streams:
        *chunks, last = stream
        assert all("error" not in chunk and not chunk["choices"][0]["finish_reason"] for chunk in chunks)
        assert error_of(last)["type"] == "server_error"
    assert time.monotonic() - killed < BROKEN_OFF_S
    ready(pair, decode=2)
    assert pair.client.complete(a_prompt(50, seed=1), 4)["usage"]["completion_tokens"] == 4
    pair.client.at_rest(LEASES_S)


def error_of(event: Any) -> dict[str, Any]:
    assert event is not None, "an end mark where there should be an error"
    error: dict[str, Any] = event["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_killed_prefill_instance_costs_a_pause(pair: Service) -> None:
    prompt = a_prompt(2000, seed=9)
    stream = pair.client.events(pair.client.body(prompt, 8, stream=True))
    pair.kill(pair.busiest("prefill"))
    *chunks, end = stream
    assert end is None
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == text_of(pair.client.complete(prompt, 8))
    ready(pair, prefill=2)
    pair.client.at_rest(LEASES_S)


@pytest.mark.parametrize("instance", ["prefill-0", "decode-1"])
def test_one_that_is_dead_and_not_yet_given_up_costs_a_pause(pair: Service, instance: str) -> None:
    """The Conductor learns it from the silence, or from the successor: whichever comes while a request waits."""
    prompts = [a_prompt(100, seed=seed) for seed in range(20, 24)]
    pair.kill(instance)
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: text_of(pair.client.complete(prompt, 20)), prompts))
    ready(pair, prefill=2, decode=2)
    assert answers == [text_of(pair.client.complete(prompt, 20)) for prompt in prompts]
    pair.client.at_rest(LEASES_S)
