"""The pool as an operator has it: every instance and every client a process, killed and paused at any moment.

Ten minutes of it: `make test ARGS="tests/kvcache_pool/test_soak_processes.py --soak-s 600 -s"`.
"""

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from kvcache_pool.api import LEASE_S, Stats
from kvcache_pool.client import KVCachePool
from kvcache_pool.leases import QUARANTINE_S
from kvcache_pool.segment import SHM
from tests.kvcache_pool.cluster import ROOT, STOP_S, UP_S, Cluster
from tests.kvcache_pool.soak_client import bytes_of
from tests.kvcache_pool.soak_program import WRONG

INSTANCES = {"hurt-0": "400KiB", "hurt-1": "200KiB", "hurt-2": "40KiB"}
"""With their memory: a few dozen blocks, some, and hardly any. The first keeps the directory, and has a disk. Each
is on a host of its own, as far as anybody can tell."""

CLIENTS = (("hurt-0", "auto"), ("hurt-1", "auto"), ("hurt-2", "auto"), ("hurt-1", "tcp"))
"""On whose host each is, and how it reaches memory: of the other hosts' over TCP in any case."""

LONG_S = 120.0
"""A soak as long as this waits for the leases of clients that were killed, and pauses some for longer."""

USS_MAX = 64 << 20
"""Bytes that an instance's own memory may grow by; what it loads when it first meets something is some of them."""


@dataclass
class Clients:
    """Programs by their numbers, started again when they are killed. Owns them."""

    conductor: str
    folder: Path
    seed: int
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    lives: "itertools.count[int]" = field(default_factory=itertools.count)

    def start(self, number: int) -> None:
        argv = [self.conductor, f"{self.seed}/{next(self.lives)}", *CLIENTS[number]]
        with self.log.open("ab") as log:
            self.running[number] = subprocess.Popen(
                [sys.executable, "-m", "tests.kvcache_pool.soak_program", *argv],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    @property
    def log(self) -> Path:
        return self.folder / "clients.log"

    async def stopped(self) -> Counter[str]:
        """What those that live have counted, once they have all stopped."""
        counts: Counter[str] = Counter()
        for one in self.running.values():
            one.send_signal(signal.SIGCONT)
            one.terminate()
        for one in self.running.values():
            out, _ = await asyncio.to_thread(one.communicate, timeout=STOP_S + UP_S)
            assert one.returncode == 0, self.log.read_text()
            counts.update(json.loads(out))
        return counts

    def close(self) -> None:
        for one in self.running.values():
            one.kill()
            one.communicate(timeout=STOP_S)


class Soak:
    """A cluster, its clients, and who hurts them."""

    def __init__(self, cluster: Cluster, clients: Clients, seconds: float, seed: int) -> None:
        self.cluster = cluster
        self.clients = clients
        self.end = time.monotonic() + seconds
        self.long = seconds >= LONG_S
        self.rng = random.Random(f"{seed}/harm")
        self.harm: Counter[str] = Counter()
        self.grown: dict[str, int] = {}
        """Of each instance, how much larger its own memory was than when it was first looked at, at most."""
        self._first: dict[int, int] = {}

    async def run(self) -> None:
        for number in range(len(CLIENTS)):
            self.clients.start(number)
        quiet = self.end if self.long else self.end - 8.0
        while time.monotonic() < quiet:
            await asyncio.sleep(0.2 + 0.6 * self.rng.random())
            await self.hurt()
            self.weigh()
        if not self.long:  # its next life knows of no lease of those that were killed
            self.cluster.kill("hurt-0")
            self.cluster.start("hurt-0")
            await asyncio.sleep(max(0.0, self.end - time.monotonic()))

    async def hurt(self) -> None:
        what = self.rng.choice(("kill", "kill", "freeze", "kill a client", "freeze a client"))
        self.harm[what] += 1
        name, number = self.rng.choice([*INSTANCES]), self.rng.randrange(len(CLIENTS))
        one = self.clients.running[number]
        if what == "kill":
            self.cluster.kill(name)
            await asyncio.sleep(self.rng.choice((0.0, 0.2, 4.0 if self.long else 0.5)))
            self.cluster.start(name)
        elif what == "freeze":
            self.cluster.freeze(name)
            await asyncio.sleep(self.rng.choice((0.1, 1.0, 6.0 if self.long else 2.0)))
            self.cluster.thaw(name)
        elif what == "kill a client":
            one.kill()
            one.communicate(timeout=STOP_S)
            self.clients.start(number)
        else:
            psutil.Process(one.pid).suspend()
            if self.long and self.rng.random() < 0.1:  # past its leases, while all else goes on
                loop = asyncio.get_running_loop()
                loop.call_later(LEASE_S + QUARANTINE_S + 5.0, one.send_signal, signal.SIGCONT)
                return
            await asyncio.sleep(self.rng.choice((0.2, 1.0, 3.0)))
            one.send_signal(signal.SIGCONT)

    def weigh(self) -> None:
        for name in INSTANCES:
            process = psutil.Process(self.cluster.processes[name].pid)
            try:
                uss = process.memory_full_info().uss
            except psutil.Error:
                continue
            if sum(process.cpu_times()[:2]) > 2.0:
                grown = uss - self._first.setdefault(process.pid, uss)
                self.grown[name] = max(grown, self.grown.get(name, 0))


async def at_rest(pool: KVCachePool, within_s: float) -> Stats:
    end = time.monotonic() + within_s
    while True:
        stats, segments = await pool.stats(), await pool.segments()
        if len(segments) == len(INSTANCES) + 1 and not stats.leases + stats.leased + stats.reserved:
            return stats
        assert time.monotonic() < end, (stats, segments)
        await asyncio.sleep(0.2)


async def read_all(pool: KVCachePool) -> tuple[int, list[str]]:
    """Every block that is offered, each by itself: how many could be read, and which had other bytes."""
    seen, wrong = 0, []
    for segment in await pool.segments():
        for note in await pool.catalogue(segment.segment):
            blocks = await pool.get([note.name])
            seen += len(blocks)
            if len(blocks) and not (blocks[0] == bytes_of(pool.names([note.name])[0])).all():
                wrong.append(note.name.hex())
    return seen, wrong


def checked(conductor: str, folder: Path) -> dict[str, object]:
    argv = [
        sys.executable,
        "-m",
        "kvcache_pool",
        "check",
        "--json",
        "--conductor",
        conductor,
        "--folder",
        str(folder),
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def files_of_ours() -> set[str]:
    return {path.name.rpartition("-")[0] for path in SHM.glob("dango-*-hurt-*")}


@pytest.mark.cluster
async def test_a_pool_of_processes(soak_processes_s: float, soak_seed: int, tmp_path: Path) -> None:
    """Nothing wrong is ever read, and afterwards every gauge is where it was."""
    assert not files_of_ours()
    async with Cluster(tmp_path) as cluster:
        for name, size in INSTANCES.items():
            disk = ("--disk-path", str(tmp_path / "disk"), "--disk-bytes", "600KiB") if name == "hurt-0" else ()
            cluster.start(name, "--size-bytes", size, "--host", name, *disk)
        await cluster.until(lambda: cluster.registry.directory is not None)
        clients = Clients(cluster.conductor, tmp_path, soak_seed)
        try:
            soak = Soak(cluster, clients, soak_processes_s, soak_seed)
            await soak.run()
            counts = await clients.stopped()
        finally:
            clients.close()
        sys.stdout.write(f"{dict(sorted(counts.items()))}\n{dict(soak.harm)}\ngrown by {soak.grown}\n")
        assert WRONG not in clients.log.read_text(), clients.log.read_text()
        assert "Traceback" not in clients.log.read_text(), clients.log.read_text()
        assert counts["verified"] > soak_processes_s
        assert counts["put"] > soak_processes_s
        assert all(grown < USS_MAX for grown in soak.grown.values()), soak.grown
        async with KVCachePool.connect(cluster.conductor) as pool:
            stats = await at_rest(pool, LEASE_S + QUARANTINE_S + UP_S if soak.long else UP_S)
            assert stats.free + stats.cached == stats.total
            told = await asyncio.to_thread(checked, cluster.conductor, tmp_path / "disk")
            seen, wrong = await read_all(pool)
            sys.stdout.write(f"{stats}\n{told}\n{seen} blocks were read\n")
            assert (told["faults"], wrong) == (0, [])
            await at_rest(pool, UP_S)
            await pool.clear()
            stats = await at_rest(pool, UP_S)
            assert (stats.free, stats.cached, stats.disk_cached) == (stats.total, 0, 0)
        assert len(files_of_ours()) == len(INSTANCES)
    assert not files_of_ours()
