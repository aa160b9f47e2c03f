"""The whole service as real processes: started, watched, hurt, and ended. Nothing of it outlives its `with`."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

from deploy.runtime import shm_files
from tests.service.client import Client

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0
STOP_S = 20.0
REST_S = 20.0
BUSY_S = 0.2
"""Long enough to see which of two processes computes: processor times are counted in hundredths."""

T = TypeVar("T")


def settings(transport: str, size: str) -> str:
    """A service for tests: a small pool, and chunks so short that a long prompt has several."""
    return f"""
        [kvcache]
        size_bytes = "{size}"
        [prefill]
        chunk_tokens = 256
        transport = "{transport}"
        [decode]
        transport = "{transport}"
    """


class Program:
    """One `dango VERB ...`. Owns the process, what that starts, and the file that takes what it says."""

    def __init__(self, log: Path, *arguments: str, within: tuple[str, ...] = (), **environ: str) -> None:
        """`within`: words before the command line, such as those of `ip netns exec`."""
        self.log = log
        argv = [*within, sys.executable, "-m", "deploy.cli", *arguments]
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, env=os.environ | environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        self.pid = self._process.pid

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ended(self, within_s: float) -> int:
        """The exit code, once it has ended by itself."""
        return self._process.wait(within_s)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM; the exit code. Whatever happens, it and all that it started are gone afterwards."""
        family = [psutil.Process(self.pid), *self.children()] if self.is_running() else []
        try:
            self._process.terminate()
            return self._process.wait(STOP_S)
        finally:
            for process in family:
                if process.is_running():
                    process.kill()
            self._process.wait(STOP_S)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)


class Service:
    """A `dango serve`, ready. Use as a context manager; leaving it asserts that it ends in good order."""

    def __init__(
        self, model: Path | None, *flags: str, transport: str = "auto", name: str = "tiny", size: str = "32MiB"
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="dt-")  # short: sockets' paths are
        self.folder = Path(self._temporary.name)
        (self.folder / "dango.toml").write_text(settings(transport, size))
        self.name = name
        given = [str(model)] if model else []
        common = ["--port", "0", "--model-name", name, "--config", str(self.folder / "dango.toml")]
        self._argv = ["serve", *given, *common, *flags]

    def __enter__(self) -> "Service":
        self.program = Program(self.folder / "log", *self._argv, TMPDIR=str(self.folder))
        try:
            self.client = Client(self._url(), self.name)
        except BaseException:
            self.program.stop()
            self._temporary.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children, shared = self.program.children(), self.shm()
        try:
            code = self.program.stop()
            assert code == 0, self.program.said()
            assert not any(child.is_running() for child in children)
            assert "Traceback" not in self.program.said(), self.program.said()
            assert not list(self.folder.glob("dango-*"))
            assert not any(file.exists() for file in shared)
        finally:
            self._temporary.cleanup()

    def _url(self) -> str:
        def said() -> str | None:
            found = re.search(r"^Serving .* at (\S+)$", self.program.said(), re.MULTILINE)
            assert found or self.program.is_running(), self.program.said()
            return found[1] if found else None

        return until(said, READY_S)

    def pids(self) -> dict[str, int]:
        """Of every living instance, by name."""
        found = {}
        for process in self.program.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # killed, and not yet started again
                line = process.cmdline()
                name = line[line.index("--instance") + 1] if "--instance" in line else "conductor"
                found[name] = process.pid
        return found

    def shm(self) -> set[Path]:
        """The shared memory files of all instances."""
        return {file for pid in self.pids().values() for file in shm_files(pid)}

    def busiest(self, pool: str) -> str:
        """The instance of a pool that computes now."""

        def cpu_s() -> dict[str, float]:
            pids = {name: pid for name, pid in self.pids().items() if name.startswith(pool)}
            return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}

        before = cpu_s()
        time.sleep(BUSY_S)
        return max((now - before[name], name) for name, now in cpu_s().items())[1]

    def kill(self, *instances: str) -> None:
        """SIGKILL, to all of them at once."""
        pids = self.pids()
        for instance in instances:
            os.kill(pids[instance], signal.SIGKILL)

    def files(self) -> dict[str, int]:
        """How many files each instance has open."""
        return {name: psutil.Process(pid).num_fds() for name, pid in self.pids().items()}

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """R3: afterwards the same processes are at rest with as many open files, and serve."""
        for choices in (1, 2):  # two go through prefill, one perhaps not: instances connect when they first must
            self.client.complete([5, 6, 7], 2, n=choices)
        self.client.at_rest()
        pids, files, shared = self.pids(), self.files(), self.shm()
        yield
        self.client.complete([5, 6, 7], 2)
        self.client.at_rest()
        assert self.pids() == pids
        assert self.shm() == shared
        until(lambda: all(now <= files[name] for name, now in self.files().items()), REST_S)


def until(look: Callable[[], T | None], within_s: float) -> T:
    """What `look` sees, once that is something."""
    end = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < end, f"not within {within_s:g} s"
        time.sleep(0.05)
    return seen
