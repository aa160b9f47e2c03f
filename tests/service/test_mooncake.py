"""Hosts of different names: KV between them goes over Mooncake's Transfer Engine, and text is equal."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.referee import a_prompt
from tests.mooncake_engine import needs_mooncake
from tests.service.by_hand import ByHand
from tests.service.client import cached, text_of
from tests.service.referee import Referee

pytestmark = [pytest.mark.cluster, needs_mooncake]

PROMPT = a_prompt(700, seed=5)


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[ByHand]:
    with ByHand(tiny) as cluster:
        cluster.conductor(DANGO_CONDUCTOR_RESTS_ON_DECODE="false")
        cluster.kvcache("--host", "one", "--transport", "mooncake")
        cluster.compute("prefill", "prefill-0", "--host", "two", "--transport", "mooncake")
        cluster.compute("decode", "decode-0", "--host", "three", "--transport", "mooncake")
        cluster.until_up(prefill=1, decode=1, kvcache=1)
        yield cluster


def test_the_text_is_the_same_cold_and_warm(cluster: ByHand, tiny: Path) -> None:
    expected = Referee(tiny).says(PROMPT)
    cold = cluster.client.complete(PROMPT, 64)
    cluster.client.at_rest()
    warm = cluster.client.complete(PROMPT, 64)
    assert (cached(cold), cached(warm)) == (0, 688)
    assert text_of(cold) == text_of(warm) == expected
    for name in ("prefill-0", "decode-0"):
        assert "not reached by Mooncake's engine" not in cluster.programs[name].said()
        libraries = Path(f"/proc/{cluster.programs[name].pid}/maps").read_text()
        assert "mooncake/engine" in libraries
        assert "/dev/shm/dango" not in libraries
    cluster.client.at_rest()
