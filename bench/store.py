"""The pool as a store: objects put and got, beside what the machine can do and what other stores do.

An object is one or several whole blocks: 3 or 32 blocks of SmolLM2-135M's KV (1.1 and 11.8 MB; 32 blocks are 512
tokens), and of 64 KiB one block of another layout. What is compared is taken in turn, in one run: the same sizes,
each time other objects of a set that no cache holds, for the copy in memory and the socket too. A get verifies the
checksum of every run. Rows are times, so less is better, and the limits are on their ratios.

    python -m bench.store --json             all of it, as a table and JSON
    python -m bench.store --peers none       without Redis and Mooncake Store
"""

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import machine_facts, watched
from bench.objects import OBJECTS, SMALL, SMOLLM, Objects, Samples, Timed, objects_of
from bench.physical import raw_socket
from bench.pool import MOONCAKE, Pool, PoolFailed, pool
from bench.report import Row, Spread, facts, percentile, table
from bench.rivals import NoRival, mooncake, redis_server
from kvcache_pool.transfer.mover import Reach
from protocol.ids import BlockHash
from protocol.process import run_process

ABOUT = "put and get of objects beside memcpy, a raw socket, Redis and Mooncake Store; lookups a second"

SLOTS = 704
"""Of SmolLM2: 260 MB, more than processors cache."""

CLIENT_SLOTS = 192
"""That a client in a process of its own rotates over: 71 MB."""

SMALL_SLOTS = 1024
BATCH = 64
PREFIX = 200
"""Blocks of the prefix that is looked up."""
CALLERS = 16
"""Lookups under way at once."""
CLIENT_S = 1.0

MEMCPY_MAX, RAW_MAX = 1 / 0.7, 1 / 0.8
"""At least 70 % of the copy's rate, and 80 % of the socket's."""

LOOKUPS_PER_S = 5000


async def _large(runs: int, samples: Samples) -> list[Row]:
    """Objects of SmolLM2's KV, through shared memory and over TCP; and two clients beside one."""
    rows: list[Row] = []
    async with pool(SMOLLM, SLOTS + 2 * CLIENT_SLOTS) as running:
        objects = await objects_of(running, SMOLLM, SLOTS)
        with raw_socket(objects.here.nbytes) as raw:
            for name, blocks in OBJECTS.items():
                things = {
                    f"copy {name}": objects.memcpy(blocks),
                    f"hash {name}": objects.copy_and_hash(blocks),
                    f"put {name}": objects.put(Reach.SHM, blocks),
                    f"get {name}": objects.get(Reach.SHM, blocks),
                    f"raw {name}": objects.raw(raw, blocks),
                    f"tcp get {name}": objects.get(Reach.TCP, blocks),
                    f"tcp put {name}": objects.put(Reach.TCP, blocks),
                }
                if MOONCAKE is not None:
                    things |= {f"mooncake get {name}": objects.get(Reach.MOONCAKE, blocks)}
                for _ in range(runs):
                    await samples.turns(120 // blocks, things)
                copied, sent = f"copy {name}", f"raw {name}"
                if MOONCAKE is not None:
                    text = f"{name}: get, Mooncake's Transfer Engine over TCP, against a raw socket"
                    rows.append(samples.row(text, f"mooncake get {name}", sent))
                rows += [
                    samples.row(f"{name}: copy and one XXH3, against the copy", f"hash {name}", copied),
                    samples.row(f"{name}: put, shared memory, against memcpy", f"put {name}", copied, MEMCPY_MAX),
                    samples.row(f"{name}: get, shared memory, against memcpy", f"get {name}", copied, MEMCPY_MAX),
                    samples.row(f"{name}: get, TCP, against a raw socket", f"tcp get {name}", sent, RAW_MAX),
                    samples.row(f"{name}: put, TCP, against a raw socket's get", f"tcp put {name}", sent),
                ]
        await objects.check()
        await objects.aclose()
        return rows + await _two_clients(running, runs)


async def _small(runs: int, samples: Samples, peers: bool, missing: list[str]) -> list[Row]:
    """Objects of 64 KiB over TCP, alone and 64 at once; and lookups."""
    async with pool(SMALL, SMALL_SLOTS) as running:
        objects = await objects_of(running, SMALL, SMALL_SLOTS - PREFIX)
        things = {"small": objects.get(Reach.TCP, 1), "batch": objects.get(Reach.TCP, BATCH)}
        with raw_socket(objects.here.nbytes) as raw:
            things |= {"small raw": objects.raw(raw, 1), "batch raw": objects.raw(raw, BATCH)}
            await _small_turns(runs, samples, things)
        tail = partial(samples.tail, percent=99)
        rows = [
            samples.row("64 KiB: get, TCP, against a raw socket", "small", "small raw"),
            Row("64 KiB: p99 of it, against the raw socket's", "us", tail("small"), tail("small raw")),
            samples.row("64 x 64 KiB: get, TCP, against a raw socket", "batch", "batch raw"),
        ]
        if peers:
            try:
                rows += await _beside_redis(runs, objects)
            except NoRival as error:
                missing.append(str(error))
        await objects.aclose()
        return rows + await _lookups(running, runs)


async def _small_turns(runs: int, samples: Samples, things: dict[str, Timed]) -> None:
    """More of one object than of 64: its tail is asked for too."""
    for _ in range(runs):
        await samples.turns(200, {name: thing for name, thing in things.items() if "batch" not in name})
        await samples.turns(20, {name: thing for name, thing in things.items() if "batch" in name})


async def _beside_redis(runs: int, objects: Objects) -> list[Row]:
    samples = Samples()
    with redis_server() as server:
        names = [f"object{number}" for number in range(BATCH)]
        for number, name in enumerate(names):
            server.set(name, objects.there[number].tobytes())

        async def small(number: int) -> None:
            server.get(names[number % BATCH])

        async def batch(_number: int) -> None:
            server.mget(names)

        async def each(_number: int) -> None:
            for name in names:
                server.get(name)

        ours = {"small": objects.get(Reach.TCP, 1), "batch": objects.get(Reach.TCP, BATCH)}
        redis = {"redis small": small, "redis batch": batch, "redis batch of single gets": each}
        await _small_turns(runs, samples, ours | redis)
    return [
        samples.row("64 KiB: get, TCP, against Redis GET", "small", "redis small", 1.5),
        samples.row("64 x 64 KiB: get, TCP, against Redis GETs", "batch", "redis batch of single gets", 1 / 3),
        samples.row("64 x 64 KiB: get, TCP, against Redis MGET", "batch", "redis batch", 1 / 3),
    ]


def _beside_mooncake(samples: Samples, runs: int) -> list[Row]:
    """Raises NoRival."""
    theirs = mooncake(SMALL.block_bytes, OBJECTS["11.8 MB"] * SMOLLM.block_bytes, 200 * runs)
    tail, large = Spread.of([percentile(theirs.small, 99)]), samples.of("tcp get 11.8 MB")
    return [
        Row("64 KiB: get, TCP, against Mooncake Store", "us", samples.of("small"), Spread.of(theirs.small)),
        Row("64 KiB: p99 of it, against Mooncake Store's", "us", samples.tail("small", 99), tail, 1.0),
        Row("64 x 64 KiB: get, TCP, against Mooncake Store", "us", samples.of("batch"), Spread.of(theirs.batch)),
        Row(
            "11.8 MB: get, TCP, against Mooncake Store",
            "us",
            large,
            Spread.of(theirs.large),
            1.0,
        ),
    ]


async def _lookups(pool: Pool, runs: int) -> list[Row]:
    """Of a prefix that is cached: microseconds each, with several under way."""
    names = [BlockHash(hashlib.sha256(number.to_bytes(4)).digest()) for number in range(PREFIX)]
    lease = await pool.lease(names)
    await pool.directory.commit(lease.lease, list(range(PREFIX)), names)
    each, alone = [], []
    for _ in range(runs):
        rounds, began = 25, time.perf_counter()

        async def caller(count: int = rounds) -> None:
            for _ in range(count):
                assert (await pool.directory.lookup(names)).reach == PREFIX

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        each.append(1e6 * (time.perf_counter() - began) / rounds / CALLERS)
        began = time.perf_counter()
        await caller()
        alone.append(1e6 * (time.perf_counter() - began) / rounds)
    return [
        Row(f"lookup of {PREFIX} blocks, {CALLERS} at once", "us", Spread.of(each), limit=1e6 / LOOKUPS_PER_S),
        Row(f"lookup of {PREFIX} blocks, one at a time", "us", Spread.of(alone)),
    ]


async def _two_clients(pool: Pool, runs: int) -> list[Row]:
    """Processes of their own that get objects of 1.1 MB through shared memory: microseconds of a get over all."""
    one, two = [], []
    for _ in range(runs):
        one.append(await _clients(pool, 1))
        two.append(await _clients(pool, 2))
    text = "1.1 MB: get, shared memory, two clients together, against one"
    return [Row(text, "us", Spread.of(two), Spread.of(one), 1 / 1.6)]


async def _clients(pool: Pool, count: int) -> float:
    pipe = asyncio.subprocess.PIPE
    argv = [sys.executable, "-m", "bench.store_client", pool.address, str(CLIENT_S)]
    clients = [await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        for client in clients:
            assert client.stdout is not None
            async with asyncio.timeout(60.0):
                await client.stdout.readline()  # it is ready
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"\n")
        gets = 0.0
        for client in clients:
            told, _ = await client.communicate()
            if client.returncode:
                raise PoolFailed("a client failed; what it said is above")
            gets += float(told)
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
                await client.wait()
    return 1e6 * CLIENT_S / gets


async def run(runs: int, peers: bool) -> list[Row]:
    """As `python -m bench store`. Raises PoolFailed."""
    rows, missing = await measure(runs, peers)
    for sentence in missing:
        print(f"not measured: {sentence}")
    return rows


async def measure(runs: int, peers: bool) -> tuple[list[Row], list[str]]:
    """All rows, and a sentence for each rival that is not here. Raises PoolFailed."""
    samples, missing = Samples(), list[str]()
    rows = await _large(runs, samples)
    rows += await _small(runs, samples, peers, missing)
    if peers:
        try:
            rows += await asyncio.to_thread(_beside_mooncake, samples, runs)
        except NoRival as error:
            missing.append(str(error))
    return rows, missing


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 1 when something could not be measured."""
    parser = argparse.ArgumentParser("python -m bench.store", description=ABOUT)
    parser.add_argument("--runs", type=int, default=5, help="samples of each number (default: %(default)s)")
    parser.add_argument("--peers", choices=("all", "none"), default="all", help="other stores (%(default)s)")
    parser.add_argument("--json", type=Path, nargs="?", const=Path("-"), help="to this file, or printed")
    arguments = parser.parse_args(argv)
    report: dict[str, Any] = {}

    async def measured() -> None:
        with watched() as watch:
            rows, missing = await measure(arguments.runs, arguments.peers == "all")
        about = {**machine_facts(), **watch.facts(alone=True)}
        if missing:
            about["not measured"] = "; ".join(missing)
        print(f"{table(rows)}\n\n{facts(about)}", flush=True)
        report.update(benchmark="store", about=about, rows=[row.body() for row in rows])

    try:
        run_process(measured())
    except PoolFailed as error:
        print(f"bench: {error}", file=sys.stderr)
    if report and arguments.json is not None:
        text = json.dumps([report], indent=2) + "\n"
        if arguments.json == Path("-"):
            print(text)
        else:
            arguments.json.write_text(text, encoding="utf-8")
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
