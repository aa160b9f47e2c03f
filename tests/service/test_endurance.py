"""What takes minutes: many lives under one name, long pauses, and many clients that leave while all is tight."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcache_pool.api import LEASE_S
from kvcache_pool.leases import QUARANTINE_S
from tests.engine.referee import a_prompt
from tests.service.by_hand import ByHand
from tests.service.client import COMPLETIONS, cached, text_of
from tests.service.processes import READY_S, ROOT, until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

LIVES = 10
HANGS_S = 30.0
RETURN_S = 10.0
REST_S = LEASE_S + QUARANTINE_S + 10.0
PROMPTS = [a_prompt(70, seed=seed) for seed in range(4)]
LARGE = [[*a_prompt(400, seed=900 + seed % 2), *a_prompt(400, seed=seed)] for seed in range(8)]
"""Each a fifth of the tight pool; their first halves are shared."""
ANSWERS = (200, 429, 503)


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[ByHand]:
    """Room for five large prompts in the pool, and for about three in decode."""
    with ByHand(tiny) as cluster:
        cluster.conductor()
        cluster.kvcache("--size-bytes", "6MiB")
        cluster.compute("prefill", "prefill-0")
        cluster.compute("decode", "decode-0", "--pages", "170")
        cluster.until_up(prefill=1, decode=1, kvcache=1)
        yield cluster


def start(cluster: ByHand, name: str) -> None:
    if name == "kvcache-0":
        cluster.kvcache("--size-bytes", "6MiB")
    else:
        cluster.compute(name.split("-")[0], name, *(("--pages", "170") if name == "decode-0" else ()))


def sound(cluster: ByHand) -> None:
    """What the index says is there, byte for byte, and is found."""
    argv = [sys.executable, "-m", "deploy.cli", "kvcache", "check", "--conductor", cluster.control]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def asked(cluster: ByHand, said: list[str]) -> Iterator[Counter[int]]:
    """Prompts go on meanwhile; each ends in its text or in a refusal, and none waits for ever."""
    over, statuses, wrong = threading.Event(), Counter[int](), []

    def ask(number: int) -> None:
        while not over.is_set():
            status, answer = cluster.client.post(COMPLETIONS, cluster.client.body(PROMPTS[number], 8))
            statuses[status] += 1
            if status not in ANSWERS or (status == 200 and text_of(answer) != said[number]):
                wrong.append((status, answer))
            time.sleep(0.05)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join(READY_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def joined(cluster: ByHand, name: str) -> int:
    """How many lives of an instance the Conductor has let in."""
    return cluster.programs["conductor"].said().count(f"joined instance={name}")


def served(cluster: ByHand) -> bool:
    return cluster.client.post(COMPLETIONS, cluster.client.body(PROMPTS[0], 2))[0] == 200


@pytest.mark.parametrize("name", ["kvcache-0", "prefill-0", "decode-0"])
def test_ten_lives_under_one_name_with_prompts_going_on(cluster: ByHand, name: str) -> None:
    """Killed and started at once, ten times: the newest life serves, and no ghost is left."""
    said = [text_of(cluster.client.complete(prompt, 8)) for prompt in PROMPTS]
    with asked(cluster, said) as statuses:
        for _ in range(LIVES):
            before = joined(cluster, name)
            cluster.kill(name, leave_memory=True)
            start(cluster, name)
            until(lambda before=before: joined(cluster, name) > before, READY_S)  # type: ignore[misc]
            cluster.until_up(prefill=1, decode=1, kvcache=1)
            until(lambda: served(cluster), RETURN_S)
    assert statuses[200]
    cluster.client.at_rest(REST_S)
    assert [text_of(cluster.client.complete(prompt, 8)) for prompt in PROMPTS] == said
    sound(cluster)


@pytest.mark.parametrize("name", ["kvcache-0", "conductor"])
def test_one_that_hangs_for_half_a_minute_is_back_soon_after(cluster: ByHand, name: str) -> None:
    """The directory: requests are refused meanwhile, none hangs. The Conductor: they wait. Then all is warm."""
    said = [text_of(cluster.client.complete(prompt, 8)) for prompt in PROMPTS]
    with asked(cluster, said):
        os.kill(cluster.programs[name].pid, signal.SIGSTOP)
        time.sleep(HANGS_S)
        os.kill(cluster.programs[name].pid, signal.SIGCONT)
        until(lambda: served(cluster), RETURN_S)
    cluster.until_up(prefill=1, decode=1, kvcache=1)
    cluster.client.at_rest(REST_S)
    warm = [cluster.client.complete(prompt, 8) for prompt in PROMPTS]
    assert [text_of(answer) for answer in warm] == said
    assert [cached(answer) for answer in warm] == [64] * len(PROMPTS)
    sound(cluster)


def test_clients_that_leave_while_all_is_tight_change_nobodys_text(cluster: ByHand) -> None:
    """Three times what fits, half of it shared; half of the clients leave at a random moment. The others get their
    own text or a refusal, and afterwards every block is back."""
    said = [text_of(cluster.client.complete(prompt, 16)) for prompt in LARGE]
    statuses: Counter[int] = Counter()

    def ask(number: int) -> None:
        rng = random.Random(number)
        which = rng.randrange(len(LARGE))
        body = cluster.client.body(LARGE[which], 16)
        if number % 2:
            connection = cluster.client.connect({**body, "max_tokens": 200})
            time.sleep(rng.random() * 0.5)
            connection.close()
            return
        status, answer = cluster.client.post(COMPLETIONS, body)
        statuses[status] += 1
        assert status in ANSWERS, answer
        assert status != 200 or text_of(answer) == said[which]

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, range(400)))
    assert statuses[200] > 100, statuses
    cluster.client.at_rest(REST_S)
    sound(cluster)
