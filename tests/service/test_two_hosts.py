"""A cluster over two network namespaces: KV between them goes over TCP, and the text is the same.

here: client, Conductor, prefill ── 10.231.x.1 ══ veth ══ 10.231.x.2 ── there: KVCache, decode
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.runtime import claim_port, shm_files
from tests.engine.referee import a_prompt
from tests.service.by_hand import ByHand
from tests.service.client import cached, text_of
from tests.service.referee import Referee

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`"),
]

PROMPT = a_prompt(700, seed=5)
KV_BYTES = 700 * 3 * 2 * 2 * 16 * 4
"""Of the prompt: tokens, layers, keys and values, heads, their size, bytes of a float."""


@dataclass(frozen=True)
class Neighbour:
    """Another network namespace, at the other end of a cable."""

    name: str
    here: str
    there: str
    cable: str

    def words(self) -> tuple[str, ...]:
        """What makes a command run there."""
        return ("ip", "netns", "exec", self.name)

    def sent_bytes(self) -> int:
        """From here to there, since the cable was laid."""
        return int(Path(f"/sys/class/net/{self.cable}/statistics/tx_bytes").read_text())


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    number = os.getpid()
    name, net = f"dango{number}", f"10.231.{number % 256}"
    cable, other = f"da{number}", f"db{number}"
    ip("netns", "add", name)
    try:
        ip("link", "add", cable, "type", "veth", "peer", "name", other, "netns", name)
        ip("addr", "add", f"{net}.1/30", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "addr", "add", f"{net}.2/30", "dev", other)
        ip("-n", name, "link", "set", other, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield Neighbour(name, f"{net}.1", f"{net}.2", cable)
    finally:
        ip("netns", "del", name)  # the cable goes with it


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


@pytest.fixture(scope="module")
def cluster(tiny: Path, neighbour: Neighbour) -> Iterator[ByHand]:
    near, far = f"tcp://{neighbour.here}:0", f"tcp://{neighbour.there}:0"
    with ByHand(tiny, f"tcp://{neighbour.here}:{claim_port(neighbour.here, 0)}") as cluster:
        cluster.conductor(DANGO_CONDUCTOR_RESTS_ON_DECODE="false")  # each prompt goes through prefill, here
        cluster.compute("prefill", "prefill-0", "--listen", near, "--host", "here")
        cluster.kvcache("--listen", far, "--host", "there", within=neighbour.words())
        cluster.compute("decode", "decode-0", "--listen", far, "--host", "there", within=neighbour.words())
        cluster.until_up(prefill=1, decode=1, kvcache=1)
        yield cluster


def test_the_text_is_the_same_and_kv_went_over_the_cable(
    cluster: ByHand, neighbour: Neighbour, tiny: Path
) -> None:
    expected = Referee(tiny).says(PROMPT)
    before = neighbour.sent_bytes()
    cold = cluster.client.complete(PROMPT, 64)
    assert text_of(cold) == expected
    assert neighbour.sent_bytes() - before > KV_BYTES
    between = neighbour.sent_bytes()
    warm = cluster.client.complete(PROMPT, 64)
    assert (cached(cold), cached(warm)) == (0, 688)
    assert text_of(warm) == expected
    assert neighbour.sent_bytes() - between < KV_BYTES / 4
    programs = cluster.programs
    assert shm_files(programs["prefill-0"].pid) == set()
    assert shm_files(programs["decode-0"].pid) == shm_files(programs["kvcache-0"].pid) != set()


def test_a_chat(cluster: ByHand) -> None:
    status, answer = cluster.client.chat({"role": "user", "content": "Who are you?"}, tokens=12)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 12
    cluster.client.at_rest()
