"""Two Conductors, one pool, one Redis, as real processes: what is warm for one is warm for both."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from conductor.presence import EXPIRY_S_MIN
from deploy.runtime import claim_port
from tests.engine.referee import a_prompt
from tests.redis_server import RedisServer, a_redis_server
from tests.service.by_hand import NAME, ByHand
from tests.service.client import Client, cached, text_of
from tests.service.processes import READY_S, Program, until

pytestmark = pytest.mark.cluster

RETURN_S = 10.0
"""What is promised: so soon after Redis' return all is as it was."""

HANGS_S = 30.0

FAST_S = 5.0
"""A short answer of the tiny model, on a busy machine."""


class Pair(ByHand):
    """Both Conductors; instances are configured with the first one's address only."""

    def __init__(self, model: Path, redis: RedisServer) -> None:
        super().__init__(model)
        self.redis = redis
        self.other_port = claim_port("127.0.0.1", 0)
        self.other = Client(f"http://127.0.0.1:{self.other_port}", NAME)

    @property
    def clients(self) -> tuple[Client, Client]:
        return self.client, self.other

    def first(self) -> Program:
        return self.conductor("--redis", self.redis.url)

    def second(self, socket: str = "conductor-1", *flags: str) -> Program:
        where = ("--port", str(self.other_port), "--listen", f"ipc://{self.folder}/{socket}")
        return self.start(
            "conductor", "conductor-1", *self._same_model(), *where, "--redis", self.redis.url, *flags
        )

    def until_both_up(self, **instances: int) -> None:
        self.until_up(**instances)
        until(lambda: up(self.other, **instances), READY_S)

    def until_whole(self, within_s: float = RETURN_S) -> None:
        """Neither Conductor is degraded."""
        until(lambda: all(degraded(client) == [] for client in self.clients), within_s)


def up(client: Client, **instances: int) -> bool:
    try:
        metrics = client.metrics()
    except OSError:
        return False
    alive = all(metrics.get(f"dango:instances_up/{pool}") == count for pool, count in instances.items())
    return alive and client.ready()


def degraded(client: Client) -> list[str]:
    """Also asserts that it is ready."""
    status, body = client.get("/ready")
    answer = json.loads(body)
    assert (status, answer["ready"]) == (200, True), answer
    return list(answer["degraded"])


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    yield from a_redis_server()


@pytest.fixture(scope="module")
def pair(tiny: Path, redis: RedisServer) -> Iterator[Pair]:
    with Pair(tiny, redis) as pair:
        pair.first()
        pair.second()
        pair.kvcache()
        pair.compute("prefill", "prefill-0")
        pair.compute("decode", "decode-0")
        pair.until_both_up(prefill=1, decode=1, kvcache=1)
        yield pair


def test_what_is_warmed_through_one_is_a_hit_through_the_other(pair: Pair) -> None:
    pair.until_whole()
    for seed, (one, other) in ((1, pair.clients), (2, pair.clients[::-1])):
        prompt = a_prompt(70, seed=seed)
        cold = one.complete(prompt, 8)
        warm = other.complete(prompt, 8)
        assert (cached(cold), cached(warm)) == (0, 64)
        assert text_of(warm) == text_of(cold)


def test_another_manifest_is_refused_by_a_sentence(pair: Pair) -> None:
    flags = ("--block-tokens", "8", "--port", "0", "--listen", f"ipc://{pair.folder}/x", "--redis", pair.redis.url)
    program = pair.start("conductor", "x", *pair._same_model(), *flags)
    assert program.ended(READY_S) == 1
    assert "block_tokens is 8, but this cluster has 16" in program.said()
    assert "Traceback" not in program.said()
    del pair.programs["x"]


def test_redis_killed_under_load_and_back_empty(pair: Pair) -> None:
    """B48: no request fails or waits; afterwards a Conductor at an address that is new is found."""
    failures: list[str] = []
    over = threading.Event()

    def ask(client: Client, seed: int) -> None:
        while not over.is_set():
            seed += 2
            began = time.monotonic()
            try:
                client.streamed(a_prompt(40, seed=seed), 8)
            except (AssertionError, OSError) as error:
                failures.append(repr(error))
            if time.monotonic() - began > FAST_S:
                failures.append("slow")

    load = [threading.Thread(target=ask, args=(client, n)) for n, client in enumerate(pair.clients)]
    for thread in load:
        thread.start()
    try:
        pair.redis.kill()
        until(lambda: all(degraded(client) for client in pair.clients), RETURN_S)
        assert "Redis cannot be used" in degraded(pair.client)[0]
        time.sleep(EXPIRY_S_MIN + 0.5)  # whatever Redis held would have expired by now
        pair.redis.start()
        pair.until_whole()
    finally:
        over.set()
        for thread in load:
            thread.join(READY_S)
    assert failures == []
    with closing(pair.redis.client()) as client:
        until(lambda: client.scard("dango:instances") == 3 and client.scard("dango:conductors") == 2, RETURN_S)
    pair.stop("conductor-1")
    pair.second("conductor-2")
    pair.until_both_up(prefill=1, decode=1, kvcache=1)
    pair.until_whole()


def test_redis_hangs_while_an_instance_is_killed_and_comes_back(pair: Pair) -> None:
    """B48, B49: it accepts and never answers. The newer life is known to both, by what the first one knew."""
    pair.redis.freeze()
    try:
        until(lambda: all(degraded(client) for client in pair.clients), RETURN_S)
        pair.kill("decode-0")
        pair.compute("decode", "decode-0")
        for client in pair.clients:
            until(lambda client=client: up(client, prefill=1, decode=1, kvcache=1), READY_S)  # type: ignore[misc]
        for n, client in enumerate(pair.clients):
            until(lambda client=client, n=n: served(client, n), RETURN_S)  # type: ignore[misc]
            began = time.monotonic()
            client.complete(a_prompt(40, seed=200 + n), 8)
            assert time.monotonic() - began < FAST_S
            assert "did not answer" in degraded(client)[0]
    finally:
        pair.redis.thaw()
    pair.until_whole()


@pytest.mark.long
def test_redis_hangs_for_half_a_minute_under_load(pair: Pair) -> None:
    """No request fails or waits for it, and soon after all is as it was."""
    pair.redis.freeze()
    try:
        end, seed = time.monotonic() + HANGS_S, 300
        while time.monotonic() < end:
            for client in pair.clients:
                seed += 1
                began = time.monotonic()
                client.complete(a_prompt(40, seed=seed), 8)
                assert time.monotonic() - began < FAST_S
        assert all(degraded(client) for client in pair.clients)
    finally:
        pair.redis.thaw()
    pair.until_whole()


def served(client: Client, seed: int) -> bool:
    """Whether a request is answered; just after a death one may still be refused."""
    return client.post("/v1/completions", client.body(a_prompt(40, seed=100 + seed), 8))[0] == 200


def test_a_conductor_starts_while_redis_is_away(pair: Pair) -> None:
    """B48: instances remember it, and it serves; Redis' return completes it."""
    prompt = a_prompt(70, seed=9)
    pair.client.complete(prompt, 8)
    pair.redis.kill()
    pair.kill("conductor-1")
    pair.second("conductor-2")
    pair.until_both_up(prefill=1, decode=1, kvcache=1)
    assert degraded(pair.other)
    assert cached(pair.other.complete(prompt, 8)) == 64
    pair.redis.start()
    pair.until_whole()
