"""A real redis-server in a folder of its own: started, killed, stopped in its tracks, started again empty."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
import redis

from deploy.runtime import claim_port

START_S = 10.0


class RedisServer:
    """Keeps nothing on disk. Use as a context manager; it is not started by entering."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="dr-")  # short: sockets' paths are
        self._socket = Path(self._temporary.name, "redis.sock")
        self._port = claim_port("127.0.0.1", 0)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.unix_url = f"unix://{self._socket}?db=0"

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._temporary.cleanup()

    def start(self) -> None:
        """Empty, and listening when this returns."""
        assert self._process is None
        where = ["--bind", "127.0.0.1", "--port", str(self._port), "--unixsocket", str(self._socket)]
        keeps = ["--dir", self._temporary.name, "--save", "", "--appendonly", "no", "--loglevel", "warning"]
        self._process = subprocess.Popen(
            ["redis-server", *where, *keeps], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended"
            assert time.monotonic() < end, "redis-server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()  # a stopped process dies of it too
            self._process.wait(START_S)
            self._process = None

    def freeze(self) -> None:
        """It accepts connections, and never answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def client(self) -> "redis.Redis":
        """Close it."""
        return redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=START_S)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


def a_redis_server() -> Iterator[RedisServer]:
    """For fixtures. Skips where there is no redis-server and nobody who could install it (`.ci/run` does)."""
    if shutil.which("redis-server") is None and os.geteuid() != 0:
        pytest.skip("there is no redis-server, and it takes root to install it")
    with RedisServer() as server:
        server.start()
        yield server
