"""Other stores, beside which ours is measured: Redis and Mooncake Store, each started here over loopback TCP.

Redis needs `redis-server` in the PATH. Mooncake Store needs an interpreter that has `mooncake-transfer-engine` (or
its `-non-cuda` build) installed, named by MOONCAKE_PYTHON, since its packages do not go with ours.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

MOONCAKE_PYTHON = "MOONCAKE_PYTHON"
PEER, ROOT = "bench.mooncake_peer", Path(__file__).resolve().parents[1]
PEER_S = 120.0
START_S = 10.0
STOP_S = 10.0


class NoRival(Exception):
    """It is not installed here, or did not come up; says what is missing."""


@dataclass(frozen=True)
class Figures:
    """Microseconds of Mooncake Store's gets into a registered buffer, from another process's segment."""

    small: list[float]
    """Of one object of 64 KiB."""
    batch: list[float]
    """Of 64 such objects at once."""
    large: list[float]
    """Of one object of `large_bytes`."""


def mooncake(small_bytes: int, large_bytes: int, samples: int) -> Figures:
    """Measure it. Raises NoRival."""
    python = os.environ.get(MOONCAKE_PYTHON, "")
    if not python or shutil.which(python) is None:
        raise NoRival(f"Mooncake Store: {MOONCAKE_PYTHON} names no interpreter that has it")
    argv = [python, "-m", PEER, str(small_bytes), str(large_bytes), str(samples)]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PEER_S)
    except subprocess.TimeoutExpired as error:
        raise NoRival(f"Mooncake Store did not end within {PEER_S} s") from error
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not told:
        raise NoRival(f"Mooncake Store failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return Figures(**json.loads(told[-1]))


@contextmanager
def redis_server() -> Iterator["redis.Redis"]:
    """One that keeps nothing on disk, and a client of it. Raises NoRival."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise NoRival("Redis: there is no redis-server here (on Debian, the package of that name)")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        keep_nothing = ["--save", "", "--appendonly", "no", "--dir", folder]
        argv = [binary, "--bind", "127.0.0.1", "--port", str(port), *keep_nothing]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
            try:
                with redis.Redis("127.0.0.1", port) as client:
                    _wait(client)
                    yield client
            finally:
                process.terminate()
                process.wait(STOP_S)


def _wait(client: "redis.Redis") -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError as error:
            if time.monotonic() > end:
                raise NoRival(f"Redis did not come up within {START_S} s") from error
            time.sleep(0.05)
