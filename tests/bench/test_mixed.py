"""Every request of the slice is sent once, by so many clients; one that is not answered ends the measurement."""

from pathlib import Path

import pytest

from bench.client import Refused, session
from bench.mixed import REQUESTS, drive, requests
from bench.setup import Setup
from simulator.workload import Arrival
from tests.bench.endpoint import an_endpoint
from tests.tiny import tiny_model


def test_the_slice_has_short_and_long_prompts_and_prefixes_in_common() -> None:
    sent = list(requests(16))
    assert len(sent) == REQUESTS
    lengths = sorted(arrival.tokens for arrival in sent)
    assert lengths[0] < 100 < 1000 < lengths[-1]
    names = [name for arrival in sent for name in set(arrival.blocks)]
    assert len(set(names)) < len(names)


async def test_each_is_sent_once_by_so_many_clients(tmp_path: Path) -> None:
    setup = Setup(model=str(tiny_model(tmp_path)))
    arrivals = [Arrival(0.0, 10 + n, 5, [n, 100 + n]) for n in range(12)]
    async with an_endpoint() as endpoint, session() as http:
        await drive(http, endpoint.url, iter(arrivals), 3, 16, setup)
    assert sorted(len(body["prompt"]) for body in endpoint.bodies) == list(range(10, 22))
    assert endpoint.open_most == 3


async def test_a_refusal_ends_it(tmp_path: Path) -> None:
    setup = Setup(model=str(tiny_model(tmp_path)))
    async with an_endpoint(4) as endpoint, session() as http:
        with pytest.raises(Refused, match="429"):
            await drive(http, endpoint.url, iter([Arrival(0.0, 10, 5, [1])] * 100), 2, 16, setup)
    assert len(endpoint.bodies) < 100
