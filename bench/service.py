"""The whole service, as `dango serve` starts it: real processes, reached over HTTP."""

import asyncio
import itertools
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.setup import Setup

READY_S_MAX = 180.0
"""A large model on a slow disk; longer than anyone would wait."""

ASK_READY_EVERY_S = 0.02
"""The grain of the time to readiness."""

STOP_S_MAX = 30.0
"""`dango serve` gives its instances less than that, and then kills them."""

ASK_S = 10.0


class NotStarted(Exception):
    """The service ended, or was not ready in time; what it said is on standard error."""


@dataclass(frozen=True)
class Service:
    """A service that is ready. Owned by `running`, which ends it."""

    url: str
    pid: int
    ready_s: float
    """From the command to the first 200 of /ready."""

    def memory_bytes(self) -> dict[str, int]:
        """Memory of each process: its own pages, and its share of the files that several have mapped. Segments
        count apart and whole: they are claimed at the start, whether or not anybody has touched them yet."""
        found: dict[str, int] = {}
        segments: dict[Path, int] = {}
        supervisor = psutil.Process(self.pid)
        for process in [supervisor, *supervisor.children(recursive=True)]:
            name = "supervisor" if process.pid == self.pid else _name_of(process.cmdline())
            found[name] = found.get(name, 0) + _unshared_bytes(process.pid)
            segments |= _segments_of(process)
        return found | {"segments": sum(segments.values())}

    async def metric(self, http: aiohttp.ClientSession, name: str) -> float:
        """The sum of a metric's samples of this name. Raises KeyError if it has none."""
        async with http.get(f"{self.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        values = [sample.value for family in families for sample in family.samples if sample.name == name]
        if not values:
            raise KeyError(name)
        return sum(values)

    async def histogram(self, http: aiohttp.ClientSession, name: str) -> list[tuple[float, float]]:
        """A histogram without labels: upper bounds, in order, and the count up to each."""
        async with http.get(f"{self.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples if sample.name == f"{name}_bucket"]
        return sorted((float(sample.labels["le"]), sample.value) for sample in samples)


def _segments_of(process: psutil.Process) -> dict[Path, int]:
    """The segments that a process has mapped, with their whole size."""
    paths = {Path(mapped.path) for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/dango-")}
    return {path: 512 * path.stat().st_blocks for path in paths}


def _unshared_bytes(pid: int) -> int:
    """Of a process, without shared memory files: its proportional set size as the kernel splits it."""
    parts = {"Pss_Anon:", "Pss_File:"}
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.split()[0] in parts)


@asynccontextmanager
async def running(setup: Setup, *flags: str) -> AsyncIterator[Service]:
    """Start a service of one instance of each pool, or as more flags say; end it afterwards. Raises NotStarted."""
    port = setup.port or _free_port()
    clock = asyncio.get_running_loop().time
    began = clock()
    process = await asyncio.create_subprocess_exec(
        *serve_command(setup, port), *flags, stdin=DEVNULL, stdout=DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(process, url)
        yield Service(url, process.pid, clock() - began)
    finally:
        await asyncio.shield(_stop(process))


def serve_command(setup: Setup, port: int) -> list[str]:
    """What is started, on a leash: the service must not outlive us, however we end."""
    flags = ["--port", str(port), "--threads", str(setup.threads)]
    flags += ["--dtype", setup.dtype] if setup.dtype else []
    leash = ["-m", "deploy.leash", str(os.getpid())]
    return [sys.executable, *leash, "-m", "deploy.cli", "serve", *([setup.model] if setup.model else []), *flags]


async def _until_ready(process: Process, url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    try:
        async with asyncio.timeout(READY_S_MAX), aiohttp.ClientSession(timeout=timeout) as http:
            while not await _is_ready(http, url):
                if process.returncode is not None:
                    raise NotStarted(f"the service ended with code {process.returncode}")
                await asyncio.sleep(ASK_READY_EVERY_S)
    except TimeoutError:
        raise NotStarted(f"the service was not ready after {READY_S_MAX:g} s") from None


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False  # it does not listen yet


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(STOP_S_MAX):
            await process.wait()
    except TimeoutError:
        process.kill()  # its instances go with it: the kernel tells them
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _name_of(command: list[str]) -> str:
    """`python -m prefill_pool --instance prefill-0 ...` as prefill-0."""
    for flag, value in itertools.pairwise(command):
        if flag == "--instance":
            return value
    return command[command.index("-m") + 1] if "-m" in command[:-1] else "other"
