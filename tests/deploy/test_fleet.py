"""Several instances together: ready, stopped in order, and never left behind."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from deploy.fleet import Fleet, NotReady
from deploy.instance import Command, Died, Instance
from deploy.runtime import base_url, claim_port, remove_shm
from tests.deploy.told import Told

CONDUCTOR = """
import http.server, os, signal, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        ready = Handler.asked > int(sys.argv[2])
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b'{}' if ready else sys.argv[3].encode())

    def log_message(self, *_):
        pass

def stop(*_):
    print('conductor drained', flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""

UP = "2026-01-01 00:00:00,000 WARNING test: up"

OTHER = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('other stopped', flush=True), os._exit(0)))
print({UP!r}, flush=True)
time.sleep(60)
"""

STUBBORN = f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print({UP!r}, flush=True)
time.sleep(60)
"""


HOLDER = f"""
import mmap, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f'/dev/shm/dango-test-{{os.getpid()}}', 'w+b') as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print({UP!r}, flush=True)
time.sleep(60)
"""


def in_shm() -> set[Path]:
    """What HOLDERs have left."""
    return set(Path("/dev/shm").glob("dango-test-*"))


class Unsure(Instance):
    """It is killed, but the kernel takes too long to say so."""

    async def kill(self) -> None:
        await super().kill()
        raise TimeoutError


class Scene:
    """A fleet of a stand-in Conductor and others, and what was told."""

    def __init__(
        self, others: Sequence[str], *, unready: int = 2, answer: str = "{}", stop_s: float = 5.0
    ) -> None:
        self.told = Told()
        port = claim_port("127.0.0.1", 0)
        commands = [Command("conductor", ["-c", CONDUCTOR, str(port), str(unready), answer])]
        commands += [Command(f"other-{number}", ["-c", code]) for number, code in enumerate(others)]
        self.instances = [Instance(command, self.told, restart_delay_s=0.01) for command in commands]
        url = base_url("127.0.0.1", port)
        self.fleet = Fleet(self.instances, url, self.told, drain_s=stop_s, stop_s=stop_s)
        self.ready = asyncio.Event()

    async def run(self, ready_s: float = 20.0) -> None:
        await self.fleet.run(ready_s, self.ready.set)

    def running(self) -> list[int]:
        return [instance.pid for instance in self.instances if instance.pid is not None]


async def test_ready_then_stopped_by_a_signal_conductor_first() -> None:
    scene = Scene([OTHER, OTHER])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scene.run())
        await scene.ready.wait()
        await scene.told.ups(2)
        pids = scene.running()
        assert len(pids) == 3
        os.kill(os.getpid(), signal.SIGTERM)
    first, *others = [line for line in scene.told.lines if UP not in line]
    assert first == "dango: stopping; running requests have 5 s (Ctrl-C again: at once)"
    assert [line.split(" | ")[1] for line in others] == ["conductor drained", "other stopped", "other stopped"]
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_ctrl_c_and_a_closed_terminal_stop_it_also_before_it_is_ready(number: signal.Signals) -> None:
    scene = Scene([OTHER], unready=10**9)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(scene.run())
        await scene.told.ups(1)
        os.kill(os.getpid(), number)
    assert task.exception() is None
    assert not scene.ready.is_set()
    assert scene.running() == []


async def test_a_second_signal_kills_at_once() -> None:
    scene = Scene([STUBBORN], stop_s=60)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scene.run())
        await scene.ready.wait()
        await scene.told.ups(1)
        asked = loop.time()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
    assert loop.time() - asked < 5
    assert scene.told.lines[-1] == "dango: stopping at once"
    assert scene.running() == []


@pytest.mark.parametrize("signals", [1, 2])
async def test_shared_memory_goes_even_if_the_end_of_its_owner_is_not_seen(signals: int) -> None:
    scene = Scene([HOLDER], stop_s=0.5)
    scene.instances[1] = Unsure(scene.instances[1].command, scene.told)
    run = asyncio.create_task(scene.run())
    await scene.ready.wait()
    await scene.told.ups(1)
    file = Path(f"/dev/shm/dango-test-{scene.instances[1].pid}")
    try:
        assert file in in_shm()
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await run
        assert file not in in_shm()
    finally:
        remove_shm({file})


async def test_what_is_missing_is_told_when_the_time_is_over() -> None:
    scene = Scene(
        [OTHER], unready=10**9, answer='{"ready": false, "missing": ["no decode instance", "no memory"]}'
    )
    with pytest.raises(NotReady, match=r"not ready after 1\.5 s: no decode instance; no memory"):
        await scene.run(ready_s=1.5)
    assert scene.running() == []


async def test_a_conductor_that_never_listens_is_told() -> None:
    scene = Scene([OTHER])
    scene.instances[0].command = Command("conductor", ["-c", OTHER])
    with pytest.raises(NotReady, match="the conductor does not answer"):
        await scene.run(ready_s=0.5)


async def test_a_death_on_the_way_up_ends_all_at_once() -> None:
    scene = Scene([OTHER, "raise SystemExit('no memory')"], unready=10**9)
    with pytest.raises(Died, match="other-1 ended"):
        await scene.run(ready_s=60)
    assert "other-1 | no memory" in scene.told.lines
    assert scene.running() == []


async def test_a_death_when_ready_is_mended() -> None:
    scene = Scene([OTHER])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scene.run())
        await scene.ready.wait()
        await scene.told.ups(1)
        first = scene.instances[1].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await scene.told.ups(2)
        os.kill(os.getpid(), signal.SIGTERM)
    assert any("starting it again" in line for line in scene.told.lines)
    assert scene.running() == []
