"""The pool of a running service, seen and used from outside."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from kvcache_pool.client import KVCachePool
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
