"""The pool of a running service, seen and used from outside."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvcache_pool.check import open_segment
from kvcache_pool.client import KVCachePool
from protocol.ids import SegmentId
from tests.engine.referee import a_prompt
from tests.service.client import cached, text_of
from tests.service.processes import ROOT, Service

pytestmark = pytest.mark.cluster

PROMPT = a_prompt(70, seed=31)
CACHED = 64
"""Whole blocks of 16."""


def control(service: Service) -> str:
    """Where the service says that its pool can be reached."""
    found = re.search(r"kvcache stats --conductor (\S+)", service.program.said())
    assert found, service.program.said()
    return found[1]


def operate(service: Service, verb: str, *arguments: str) -> dict[str, int]:
    """What `dango kvcache VERB --json` answers."""
    argv = [sys.executable, "-m", "deploy.cli", "kvcache", verb, "--json", "--conductor", control(service)]
    done = subprocess.run([*argv, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, int] = json.loads(done.stdout)
    return answer


async def test_kv_that_another_program_took_out_and_put_back_serves_the_same_text(service: Service) -> None:
    cold = service.client.complete(PROMPT, 8)
    service.client.at_rest()
    async with KVCachePool.connect(control(service)) as pool:
        found = await pool.lookup(PROMPT)
        assert (found.tokens, found.segments) == (CACHED, {"kvcache-0": CACHED // 16})
        kv = await pool.get(PROMPT)
        assert pool.typed(kv).dtype == np.float32
        assert await pool.clear() >= CACHED // 16
        assert not any(await pool.exists(PROMPT))
        assert await pool.put(PROMPT, kv) == CACHED // 16
    warm = service.client.complete(PROMPT, 8)
    assert cached(warm) == CACHED
    assert text_of(warm) == text_of(cold)


def test_an_operator_sees_and_changes_what_requests_find(service: Service) -> None:
    tokens = [str(token) for token in PROMPT]
    service.client.complete(PROMPT, 8)
    service.client.at_rest()
    assert operate(service, "lookup", *tokens)["tokens"] == CACHED
    assert operate(service, "pin", *tokens)["blocks"] == CACHED // 16
    counts = operate(service, "stats")
    assert counts["cached"] + counts["free"] == counts["total"]
    assert operate(service, "unpin", *tokens)["blocks"] == CACHED // 16
    assert operate(service, "remove", *tokens)["blocks"] == CACHED // 16
    assert cached(service.client.complete(PROMPT, 8)) == 0
    service.client.at_rest()
    operate(service, "clear")
    assert operate(service, "lookup", *tokens)["tokens"] == 0


@pytest.mark.parametrize("which", [0, 1, 3], ids=["first", "middle", "last"])
async def test_a_block_that_went_bad_is_recomputed_for_all_who_share_it(service: Service, which: int) -> None:
    """Its load fails for several at once: none gets other text, and it is not offered again."""
    prompt = a_prompt(70, seed=40 + which)
    cold = service.client.complete(prompt, 8)
    service.client.at_rest()
    async with KVCachePool.connect(control(service)) as pool:
        notes = {note.name: note for note in await pool.catalogue(SegmentId("kvcache-0"))}
        slot = notes[pool.names(prompt)[which]].slot
    for path in service.shm():
        open_segment(path).memory.runs[slot, 1, 0] ^= 0xFF
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: service.client.complete(prompt, 8), range(3)))
    assert [text_of(answer) for answer in answers] == [text_of(cold)] * 3
    assert min(map(cached, answers)) <= which * 16
    assert cached(service.client.complete(prompt, 8)) == CACHED
    service.client.at_rest()
    assert operate(service, "check")["faults"] == 0
