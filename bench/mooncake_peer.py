"""Mooncake Store as it is used over tcp, measured by its own interpreter: imports nothing of ours.

    python bench/mooncake_peer.py SMALL_BYTES LARGE_BYTES SAMPLES

A master, a process with a segment that has put all objects, and here a client without one, which gets them into a
buffer that was registered once. Prints one line of JSON: microseconds of each get.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from mooncake.store import MooncakeDistributedStore

BATCH = 64
LARGE_OBJECTS = 8
BUFFER_BYTES = 128 << 20
SEGMENT_BYTES = 512 << 20
HERE = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HERE, 0)) as taken:
        return int(taken.getsockname()[1])


def open_store(master: str, segment: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    if store.setup(HERE, "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master):
        raise SystemExit("setup failed")
    return store


def serve(master: str, small: int, large: int) -> None:
    """Put all objects, say so, and stay until the input is closed."""
    store = open_store(master, SEGMENT_BYTES)
    for count, size, name in ((BATCH, small, "small"), (LARGE_OBJECTS, large, "large")):
        for number in range(count):
            if store.put(f"{name}{number}", os.urandom(size)):
                raise SystemExit(f"could not put {name}{number}")
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def timed(count: int, get) -> list[float]:  # type: ignore[no-untyped-def]
    """Microseconds of each of `count` calls, after a tenth as many that are not counted."""
    taken = []
    for number in range(-(count // 10) - 1, count):
        began = time.perf_counter()
        get(number)
        if number >= 0:
            taken.append(1e6 * (time.perf_counter() - began))
    return taken


def measure(master: str, small: int, large: int, samples: int) -> dict[str, list[float]]:
    store = open_store(master, 0)
    memory = ctypes.create_string_buffer(BUFFER_BYTES)
    at = ctypes.addressof(memory)
    if store.register_buffer(at, BUFFER_BYTES):
        raise SystemExit("could not register the buffer")

    def one(name: str, count: int, size: int, number: int) -> None:
        if store.get_into(f"{name}{number % count}", at, size) != size:
            raise SystemExit(f"a get of {name} failed")

    def batch(_number: int) -> None:
        places = [at + place * small for place in range(BATCH)]
        if set(store.batch_get_into(names, places, [small] * BATCH)) != {small}:
            raise SystemExit("a batch of gets failed")

    names = [f"small{number}" for number in range(BATCH)]
    figures = {
        "small": timed(samples, lambda number: one("small", BATCH, small, number)),
        "batch": timed(max(5, samples // 20), batch),
        "large": timed(max(5, samples // 20), lambda number: one("large", LARGE_OBJECTS, large, number)),
    }
    store.close()
    return figures


def main() -> None:
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    small, large, samples = map(int, sys.argv[1:4])
    port = free_port()
    master = f"{HERE}:{port}"
    binary = str(Path(sys.executable).with_name("mooncake_master"))
    flags = ["--rpc_port", str(port), "--metrics_port", str(free_port())]
    quiet = subprocess.DEVNULL
    with subprocess.Popen([binary, *flags], stdout=quiet, stderr=quiet) as running:
        try:
            time.sleep(1.0)  # it says nothing when it listens
            argv = [sys.executable, __file__, "serve", master, str(small), str(large)]
            pipe = subprocess.PIPE
            with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=quiet, text=True) as server:
                try:
                    assert server.stdout is not None
                    while (line := server.stdout.readline()) and line != "ready\n":
                        pass
                    print(json.dumps(measure(master, small, large, samples)), flush=True)
                    assert server.stdin is not None
                    server.stdin.close()
                    server.wait(10)
                finally:
                    server.kill()
        finally:
            running.terminate()


if __name__ == "__main__":
    main()
