"""How a service is started for measuring."""

import os

import pytest

from bench.service import NotStarted, _name_of, running, serve_command
from bench.setup import Setup


def test_the_service_is_started_with_what_is_measured_and_no_more() -> None:
    leash = ["-m", "deploy.leash", str(os.getpid()), "-m", "deploy.cli", "serve"]
    assert serve_command(Setup(), 8000)[1:] == [*leash, "--port", "8000", "--threads", "1"]
    command = serve_command(Setup(model="m.gguf", dtype="float32", threads=3), 9000)
    assert command[1:] == [*leash, "m.gguf", "--port", "9000", "--threads", "3", "--dtype", "float32"]


def test_processes_are_named_by_their_instance() -> None:
    leashed = [
        "python",
        "-m",
        "deploy.leash",
        "17",
        "-m",
        "prefill_pool",
        "--instance",
        "prefill-0",
        "--port",
        "1",
    ]
    assert _name_of(leashed) == "prefill-0"
    assert _name_of(["python", "-m", "conductor", "--listen", "x"]) == "conductor"
    assert _name_of(["sh"]) == "other"
    assert _name_of([]) == "other"


async def test_a_service_that_cannot_start_is_told() -> None:
    with pytest.raises(NotStarted, match="ended with code"):
        async with running(Setup(model="/nowhere/m.gguf")):
            pytest.fail("it is not ready")
