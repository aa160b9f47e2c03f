"""Clients that leave, in every phase: work stops, every block comes back, and each is counted once."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.referee import a_prompt
from tests.service.client import Client
from tests.service.processes import Service

pytestmark = pytest.mark.cluster

CYCLES = 3
"""For each way to leave; there are sixteen ways."""

AFTER_S = (0.0, 0.02, 0.1, 0.5)
"""Queued or in prefill, in prefill, in transfer, in decode: a prompt of three chunks takes about 0.2 s."""

PROMPT = 600
TOKENS = 1000
STEPS_MORE = 2
HEARD_S = 0.1
"""From the close until the decode instance knows of it, where the machine has much else to do."""


@pytest.fixture(scope="module")
def slow(deep: Path) -> Iterator[Service]:
    """Steps take so long that what happens between two of them can be told."""
    with Service(deep, "--dtype", "float32", "--threads", "1") as service:
        yield service


def leave(connection: socket.socket, *, half: bool) -> None:
    """Close the connection; or only our side of it, and hear the other side end too."""
    if half:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        while connection.recv(1 << 16):
            pass
    connection.close()


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_clients_that_leave_leave_nothing_behind(slow: Service, stream: bool, half: bool) -> None:
    """B34"""
    client = slow.client
    with slow.unharmed():
        before = client.at_rest()
        for cycle in range(CYCLES):
            for after_s in AFTER_S:
                prompt = a_prompt(PROMPT, seed=cycle * 100 + int(1000 * after_s))
                connection = client.connect(client.body(prompt, 1000, stream=stream))
                time.sleep(after_s)
                leave(connection, half=half)
        after = client.at_rest()
        closes = CYCLES * len(AFTER_S)
        for outcome, count in (("cancelled", closes), ("finished", 0), ("failed", 0), ("refused", 0)):
            name = f"dango:requests_total/{outcome}"
            assert after[name] - before[name] == count, name


def tokens(client: Client) -> float:
    return client.metrics()["vllm:generation_tokens_total"]


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_decoding_stops_within_two_steps(slow: Service, stream: bool, half: bool) -> None:
    """B34: the first token is prefill's; each other one that came before the close was heard took a step."""
    client = slow.client
    before = client.at_rest()
    connection = client.connect(client.body(a_prompt(40, seed=1), TOKENS, stream=stream))
    seen = list[tuple[float, float]]()  # when there were how many tokens
    while not seen or seen[-1][1] < 12:
        seen.append((time.monotonic(), tokens(client) - before["vllm:generation_tokens_total"]))
        time.sleep(0.01)
    leave(connection, half=half)
    after = client.at_rest()
    made, steps = (
        after[name] - before[name] for name in ("vllm:generation_tokens_total", "dango:steps_total/decode")
    )
    (began, first), (ended, last) = next(point for point in seen if point[1]), seen[-1]
    more = STEPS_MORE + HEARD_S * (last - first) / (ended - began)
    assert made - 1 <= steps <= made - 1 + more < TOKENS / 10


def test_a_client_that_leaves_disturbs_no_other(slow: Service) -> None:
    client, prompt = slow.client, a_prompt(60, seed=3)
    alone = client.streamed(prompt, 40).text
    stayed = client.events(client.body(prompt, 40, stream=True))
    heard = [next(stayed)]
    for seed in range(6):
        leave(client.connect(client.body(a_prompt(300, seed=seed), 500, stream=True)), half=False)
        heard.append(next(stayed))
    *rest, end = stayed
    assert end is None
    assert "".join(chunk["choices"][0]["text"] for chunk in [*heard, *rest]) == alone
    client.at_rest()
