"""`dango kvcache stats|lookup|...`: an operator looks into a running pool, or changes what it keeps.

Each verb is one function from a connected client to its answer: a map for machines, lines for people.
"""

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvcache_pool.check import Checked, check_file, check_segment, found_files
from kvcache_pool.client import KVCachePool
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.drain import WAIT_S
from kvcache_pool.drain import drain as drain_segment
from kvcache_pool.segment import SHM
from protocol.errors import DangoError
from protocol.ids import SegmentId
from protocol.settings import SettingsError, load_section

PIN_S = 3600.0
"""How long a pin lasts that names no time."""

TOKENS_CHARS_MAX = 64 << 20
"""Of a list of tokens on standard input: several million of them, more than any prompt has."""


class Answer(NamedTuple):
    """What a verb has to say."""

    fields: dict[str, Any]
    """For machines."""
    lines: list[str]
    """For people."""
    wrong: bool = False
    """Whether something is not as it should be; the command then fails."""


Verb = Callable[[KVCachePool, argparse.Namespace], Awaitable[Answer]]


async def stats(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """Blocks of the pool and of each segment, and of a tenant."""
    counts, segments = await pool.stats(), await pool.segments()
    mebibytes = counts.total * pool.stored.block_bytes / (1 << 20)
    held = f"{counts.leased} in use by {counts.leases} leases, {counts.copies} copies"
    lines = [
        f"{counts.total} blocks of {pool.layout.block_tokens} tokens, {mebibytes:.0f} MiB",
        f"  {counts.free} free, {counts.cached} cached, {counts.reserved} being written",
        f"  {held}, {counts.evicted} evicted so far",
    ]
    if counts.tenants:
        most = f"the largest with {counts.largest_tenant} blocks, {counts.over_quota} leases refused for a quota"
        lines.append(f"  tenants: {counts.tenants}, {most}")
    for one in segments:
        used = f"{one.free} of {one.total} free, {one.cached} cached, {one.leased} in use, {one.pinned} pinned"
        lines.append(f"{one.segment} on {one.host}: {used}{', draining' if one.draining else ''}")
    told = {"block_bytes": pool.stored.block_bytes, "segments": [one._asdict() for one in segments]}
    if asked.tenant:
        own = await pool.tenant()
        lines.append(f"tenant {asked.tenant}: {own.blocks} blocks, {_bound(own.quota)}")
        told["tenant"] = asdict(own)
    return Answer({**asdict(counts), **told}, lines)


def _bound(quota: int | None) -> str:
    return "no quota" if quota is None else f"{quota} at most"


async def lookup(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """How much of a prompt is cached, and where."""
    found = await pool.lookup(asked.tokens)
    lines = [f"{found.tokens} of {len(asked.tokens)} tokens are cached, {found.blocks} blocks"]
    lines += [f"  {segment}: {blocks} blocks" for segment, blocks in found.segments.items()]
    return Answer({**asdict(found), "asked": len(asked.tokens)}, lines)


async def clear(pool: KVCachePool, _: argparse.Namespace) -> Answer:
    """Forget every block that is not in use."""
    return _counted(await pool.clear(), "forgotten")


async def pin(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """Keep what is cached of a prompt."""
    return _counted(await pool.pin(asked.tokens, asked.for_s, hard=asked.hard), "pinned")


async def unpin(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """End the pins of a prompt's blocks."""
    return _counted(await pool.unpin(asked.tokens), "unpinned")


async def remove(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """Forget a prompt's blocks, pinned or not."""
    return _counted(await pool.remove(asked.tokens), "forgotten")


async def copy(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """Copy what is cached of a prompt to a segment, as far as the budget of copies goes."""
    return _counted(await pool.copy(asked.tokens, asked.to), f"in {asked.to} now")


async def move(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """Move what is cached of a prompt to a segment, with its pins."""
    return _counted(await pool.move(asked.tokens, asked.to), f"in {asked.to} now")


async def drain(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """Carry all blocks of a segment to others, so that its process can be stopped; wait until that is done."""
    if asked.undo:
        blocks = await pool.drain(asked.segment, undo=True)
        return Answer({"segment": asked.segment, "blocks": blocks}, [f"{asked.segment} is drained no more"])
    outcome = await drain_segment(
        pool, SegmentId(asked.segment), asked.wait, lambda said: _say(f"{asked.segment}: {said}")
    )
    if outcome.drained:
        line = f"{asked.segment} is drained: its process may be stopped"
    else:
        line = f"{asked.segment} is not drained: {outcome.why}"
    return Answer(asdict(outcome), [line], wrong=not outcome.drained)


def _say(line: str) -> None:
    """Progress, for people: machines read the answer."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


async def check(pool: KVCachePool, asked: argparse.Namespace) -> Answer:
    """Verify the index against the segments of this host, and every checksum."""
    files = _files(asked)
    checked = [
        await check_segment(one.segment, one.incarnation, files, partial(pool.catalogue, one.segment))
        for one in await pool.segments()
    ]
    return _checked(checked)


VERBS: Mapping[str, Verb] = {
    "stats": stats,
    "lookup": lookup,
    "clear": clear,
    "pin": pin,
    "unpin": unpin,
    "remove": remove,
    "copy": copy,
    "move": move,
    "drain": drain,
    "check": check,
}
ABOUT_TOKENS = frozenset(("lookup", "pin", "unpin", "remove", "copy", "move"))


def main(argv: Sequence[str]) -> int:
    """Run one verb. Returns the exit code: 1 with a sentence when the pool cannot be reached or refuses, 2 for a
    command line or setting that cannot be read, 130 after Ctrl-C."""
    parser = parser_of_all()
    asked = parser.parse_args(argv)
    try:
        given = argparse.Namespace(conductor=asked.conductor)
        config = load_section(KVCacheConfig, "kvcache", flags=given, environ=os.environ, file=asked.config)
    except SettingsError as error:
        parser.exit(2, f"dango kvcache: {error}\n")
    try:
        if asked.verb in ABOUT_TOKENS:
            asked.tokens = _tokens(asked.tokens)
        offline = asked.verb == "check" and asked.offline
        answer = _offline(asked) if offline else asyncio.run(_run(config, asked))
    except (DangoError, OSError, ValueError) as error:
        sys.stderr.write(f"dango kvcache {asked.verb}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130  # as in a shell
    text = json.dumps(answer.fields) if asked.json else "\n".join(answer.lines)
    return _told(f"{text}\n", asked.verb) or int(answer.wrong)


def _told(text: str, verb: str) -> int:
    """Print the answer. Returns 1 if it cannot be: the reader is gone, or the disk is full."""
    if sys.stdout is None:  # closed by the caller, who wants the exit status alone
        return 0
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        sys.stderr.write(f"dango kvcache {verb}: the answer cannot be written: {error}\n")
        return 1
    return 0


def _offline(asked: argparse.Namespace) -> Answer:
    return _checked([check_file(path) for path in _files(asked)], whole=True)


def _files(asked: argparse.Namespace) -> list[Path]:
    """Of segments, on this host. Raises ValueError for a folder that is none."""
    wrong = next((folder for folder in asked.folders if not folder.is_dir()), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is no folder")
    return found_files([SHM, *asked.folders])


async def _run(config: KVCacheConfig, asked: argparse.Namespace) -> Answer:
    tenant, salt = getattr(asked, "tenant", ""), getattr(asked, "salt", "")
    async with KVCachePool.connect(config.conductor, tenant=tenant, salt=salt, host=config.host) as pool:
        return await VERBS[asked.verb](pool, asked)


def parser_of_all() -> argparse.ArgumentParser:
    """What every verb takes."""
    parser = argparse.ArgumentParser("dango kvcache", description="Ask a running KVCache pool, or change it.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        sentence = verb.__doc__ or ""
        one = verbs.add_parser(name, help=sentence, description=sentence)
        add_arguments(one, name)
    return parser


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """What one verb takes."""
    where = f"the Conductor's control address; of several, with commas (default: {KVCacheConfig.conductor})"
    parser.add_argument("--conductor", metavar="TEXT", help=where)
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in TOML; this reads [kvcache]")
    parser.add_argument("--json", action="store_true", help="answer with one JSON object (default: in words)")
    if name in ABOUT_TOKENS:
        parser.add_argument("tokens", nargs="+", metavar="TOKEN", help="token ids of the prompt; - reads them")
        parser.add_argument("--salt", default="", help="cache_salt of the prompt (default: none)")
        parser.add_argument("--tenant", default="", help="tenant of the prompt (default: none)")
    if name in ("copy", "move"):
        parser.add_argument("--to", metavar="SEGMENT", required=True, help="the segment that takes the blocks")
    if name == "drain":
        parser.add_argument("segment", metavar="SEGMENT", help="as `dango kvcache stats` names it")
        seconds = f"wait at most so long until it is empty; the drain goes on in any case (default: {WAIT_S:g})"
        parser.add_argument("--wait", type=float, default=WAIT_S, metavar="SECONDS", help=seconds)
        parser.add_argument("--undo", action="store_true", help="let it be like any other again")
    if name == "stats":
        parser.add_argument("--tenant", default="", help="count this tenant's blocks too (default: none)")
    if name == "check":
        offline = "no pool runs: check what the files themselves say (default: what the directory says)"
        parser.add_argument("--offline", action="store_true", help=offline)
        where = f"folder of a disk tier, besides {SHM}; may be given several times"
        parser.add_argument(
            "--folder", dest="folders", metavar="PATH", type=Path, action="append", default=[], help=where
        )
    if name == "pin":
        seconds = f"for so many seconds (default: {PIN_S:g})"
        parser.add_argument("--for-s", type=float, default=PIN_S, metavar="X", help=seconds)
        parser.add_argument("--hard", action="store_true", help="whatever else must go (default: a soft pin)")


def _tokens(words: Sequence[str]) -> list[int]:
    """Token ids from the command line, or standard input: JSON, or with spaces between. Raises ValueError."""
    if [*words] == ["-"]:
        if sys.stdin is None:
            raise ValueError("standard input is closed: there are no tokens to read")
        text = sys.stdin.read(TOKENS_CHARS_MAX + 1)
        if len(text) > TOKENS_CHARS_MAX:
            raise ValueError(f"more than {TOKENS_CHARS_MAX} characters are no prompt")
        words = re.sub(r"[\[\],]", " ", text).split()
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise ValueError(f"a token is a whole number, not {wrong[:80]!r}")
    return [int(word) for word in words]


def _checked(checked: Sequence[Checked], *, whole: bool = False) -> Answer:
    """`whole`: nothing may be left unchecked; else that is for other hosts."""
    lines, faults = [] if checked else ["there is no segment to check"], 0
    for one in checked:
        lines.append(f"{one.segment}: {one.reason or f'{one.blocks} blocks, {len(one.faults)} of them wrong'}")
        lines += [f"  block {fault.name.hex()} in slot {fault.slot}: {fault.reason}" for fault in one.faults]
        faults += len(one.faults)
    told = [
        {
            "segment": one.segment,
            "blocks": one.blocks,
            "reason": one.reason,
            "faults": [{**asdict(fault), "name": fault.name.hex()} for fault in one.faults],
        }
        for one in checked
    ]
    wrong = faults > 0 or not checked or (whole and any(one.reason for one in checked))
    return Answer({"segments": told, "faults": faults}, lines, wrong)


def _counted(blocks: int, done: str) -> Answer:
    return Answer({"blocks": blocks}, [f"{blocks} {'block is' if blocks == 1 else 'blocks are'} {done}"])
