"""A pool of real `dango kvcache` processes, each of which may be killed or paused; and as much of a Conductor as
they need."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from deploy.runtime import remove_shm, shm_files
from kvcache_pool.segment import SHM
from protocol.cluster import Manifest
from protocol.message import Message
from protocol.registry import (
    DirectoryAt,
    GetDirectory,
    GetManifest,
    Heard,
    Leave,
    Register,
    Report,
    Superseded,
    Welcome,
)
from protocol.rpc import Handler, Server, at_once
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import LAYOUT

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = Manifest("tiny", "m", "t", 256, LAYOUT)
STOP_S = 20.0
UP_S = 30.0


class Registry:
    """Who has registered, and where the directory is. It gives nobody up by itself."""

    def __init__(self) -> None:
        self.directory: str | None = None
        self._lives: dict[str, list[str]] = {}

    def handlers(self) -> dict[type[Message], Handler]:
        return dict(
            [
                at_once(GetManifest, lambda _: MANIFEST),
                at_once(GetDirectory, lambda _: DirectoryAt(self.directory)),
                at_once(Register, self._register),
                at_once(Report, lambda message: self._heard(message.instance, message.incarnation)),
                at_once(Leave, lambda message: self._heard(message.instance, message.incarnation)),
            ]
        )

    def _register(self, message: Register) -> Welcome:
        lives = self._lives.setdefault(message.instance, [])
        if message.incarnation in lives[:-1]:
            raise Superseded(f"{message.instance} has a newer life")
        if message.incarnation not in lives:
            lives.append(message.incarnation)
        if message.directory:
            self.directory = message.address
        return Welcome(Heard(True, self.directory))

    def _heard(self, instance: str, incarnation: str) -> Heard:
        return Heard(self._lives.get(instance, [])[-1:] == [incarnation], self.directory)


class Cluster:
    """Processes by the names of their instances; the first that is started keeps the directory. Use as a context
    manager: leaving it asserts that who is left ends in good order and leaves nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = AsyncExitStack()
        self._flags: dict[str, tuple[str, ...]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.registry = Registry()

    async def __aenter__(self) -> "Cluster":
        transport = ZmqTransport()
        self._stack.callback(transport.close)
        server = Server(transport.bind("tcp://127.0.0.1:0"), self.registry.handlers())
        self.conductor = server.address
        serving = asyncio.create_task(server.serve())
        self._stack.push_async_callback(_ended, serving)
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._stack:
            living = {name: one for name, one in self.processes.items() if one.poll() is None}
            shared = {path for one in living.values() for path in shm_files(one.pid)}
            try:
                for one in reversed(living.values()):  # the directory last: it hears the others' farewells
                    one.send_signal(signal.SIGCONT)
                    one.terminate()
                codes = {name: await asyncio.to_thread(one.wait, STOP_S) for name, one in living.items()}
                assert set(codes.values()) <= {0}, (codes, self.said(*living))
                assert not any(path.exists() for path in shared)
                assert "Traceback" not in self.said(*self._flags)
            finally:
                for name, one in self.processes.items():
                    if one.poll() is None:
                        one.kill()
                    one.wait(STOP_S)
                    remove_shm(set(SHM.glob(f"dango-{os.getuid()}-{name}-*")))

    def start(self, name: str, *flags: str) -> None:
        """An instance, or its next life, with the flags of the one before if none are given."""
        self._flags.setdefault(name, (*flags, *(("--no-directory",) if self._flags else ())))
        argv = ["-m", "kvcache_pool", "--instance", name, "--conductor", self.conductor, *self._flags[name]]
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *argv], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, *names: str) -> None:
        """SIGKILL. What they have in /dev/shm is left to their next lives."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes[name].wait(STOP_S)
        if next(iter(self._flags)) in names:
            self.registry.directory = None

    def freeze(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def said(self, *names: str) -> str:
        """What these and their earlier lives have logged."""
        return "\n".join(self._log(name).read_text(errors="replace") for name in names)

    async def until(self, look: Callable[[], bool], within_s: float = UP_S) -> None:
        end = time.monotonic() + within_s
        while not look():
            assert time.monotonic() < end, self.said(*self._flags)
            await asyncio.sleep(0.02)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
