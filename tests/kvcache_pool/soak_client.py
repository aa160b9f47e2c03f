"""One client of a soaked pool: what it will do is drawn beforehand from a seed, and every byte that it gets is
compared with what the block's name says it must be."""

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import TypeVar

import numpy as np

from kvcache_pool.api import Acquire, DirectoryLink, Grant, Lease, LeaseLost, Mover, PoolFull, Priority, new_lease
from kvcache_pool.segment import Bytes
from protocol.errors import DangoError, PeerLost
from protocol.ids import BlockHash, SegmentId
from tests.kvcache_pool.builders import LAYOUT

TRIES = 4
"""Of a call whose answer was lost, and of a read."""

T = TypeVar("T")


@lru_cache(maxsize=4096)
def bytes_of(name: BlockHash) -> Bytes:
    """What a block holds, [layers, run_bytes]: a function of its name, so that any wrong byte is known for one."""
    generator = np.random.default_rng(int.from_bytes(name[:8], "big"))
    return generator.integers(0, 256, (LAYOUT.layers, LAYOUT.run_bytes), dtype=np.uint8)


def chain(path: Sequence[int]) -> list[BlockHash]:
    """The names of a prompt's blocks; prompts that begin alike share names."""
    names, parent = [], b"soak"
    for step in path:
        parent = hashlib.sha256(parent + step.to_bytes(4, "big")).digest()
        names.append(BlockHash(parent))
    return names


class Ending(Enum):
    """How a turn ends."""

    RELEASE = "release"
    FORGET = "forget"  # commits, but never releases
    DIE = "die"  # between reserve and commit
    LATE = "late"  # writes and commits after its lease has ended


@dataclass(frozen=True)
class Turn:
    """All that a client draws for one request, whatever then happens to it."""

    path: tuple[int, ...]
    reuse: int
    unnamed: int
    near: int | None
    copies: int
    lease_s: float
    ending: Ending
    whole: bool
    pause_s: float
    renew: bool
    twice: bool
    slander: bool
    clear: bool


def draw(rng: random.Random, abandon: bool) -> Turn:
    """`abandon`: whether leases may be left to end by themselves."""
    ends = [Ending.RELEASE] * 92 + ([Ending.FORGET] * 3 + [Ending.DIE] * 3 + [Ending.LATE] * 2 if abandon else [])
    ending = rng.choice(ends)
    return Turn(
        path=tuple(rng.choice((0, 0, 0, 1, 1, 2, rng.randrange(8))) for _ in range(rng.randint(1, 7))),
        reuse=rng.choice((0, 1, 3, 99, 99, 99)),
        unnamed=rng.choice((0, 0, 1, 2)),
        near=rng.choice((None, 0, 1, 2)),
        copies=rng.choice((0, 0, 4)),
        lease_s=2.0 if ending is not Ending.RELEASE else rng.choice((10.0, 20.0)),
        ending=ending,
        whole=rng.random() < 0.3,
        pause_s=rng.choice((0.0, 0.0, 0.0, 0.02, rng.random() * 0.5)),
        renew=rng.random() < 0.1,
        twice=rng.random() < 0.05,
        slander=rng.random() < 0.03,
        clear=rng.random() < 0.004,
    )


@dataclass
class Tally:
    """What all clients together have seen."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Bytes that are not what their name says, and blocks that are gone though nothing happened to them."""
    troubles: int = 0
    """Begun and ended so far: a segment or directory killed, paused, or restarted. Odd while one is."""
    late: Counter[tuple[SegmentId, int]] = field(default_factory=Counter)
    """Slots that somebody without a lease is writing to now: it may spoil what is there, which readers notice."""


@dataclass
class SoakClient:
    """Owns nothing: the link and the mover are its world's."""

    link: DirectoryLink
    mover: Mover
    rng: random.Random
    segments: Sequence[SegmentId]
    tally: Tally
    abandon: bool = True

    async def run(self, over: Callable[[], bool]) -> None:
        while not over():
            turn = draw(self.rng, self.abandon)
            self.tally.counts["turns"] += 1
            try:
                await self.turn(turn)
            except PoolFull:
                self.tally.counts["full"] += 1
                await asyncio.sleep(0.01)
            except DangoError as error:
                self.tally.counts[type(error).__name__] += 1
                await asyncio.sleep(0.02)

    async def turn(self, turn: Turn) -> None:
        names = chain(turn.path)
        near = None if turn.near is None else self.segments[turn.near % len(self.segments)]
        ask = Acquire(new_lease(), "soak", names, turn.reuse, turn.unnamed, near, turn.lease_s, copies=turn.copies)
        if turn.clear:
            await self.link.get().clear()
        found = await self.link.get().lookup(names)
        assert all(count <= found.reach <= len(names) for count in found.held.values())
        ended = False
        try:
            lease = await self.acquire(ask)
            ended = await self.use(turn, names, lease)
        finally:
            if not ended:
                await self.again(lambda: self.link.get().release(ask.lease, names[:2]), quiet=True)

    async def acquire(self, ask: Acquire) -> Lease:
        """Again under another name, if an answer was lost; the finally of `turn` releases only the last."""
        lease = await self.link.get().acquire(ask)
        self.tally.counts["leases"] += 1
        self.mover.know(lease.places)
        return lease

    async def use(self, turn: Turn, names: list[BlockHash], lease: Lease) -> bool:
        """True if the lease is left to itself."""
        troubles = self.tally.troubles
        known = names[: len(lease.sources)]
        good = await self.verified(lease.sources, known, troubles)
        if good < len(known):
            await self.link.get().discard(lease.sources[good:])
            self.tally.counts["bad sources"] += 1
            return False
        await asyncio.sleep(turn.pause_s)
        if turn.renew and turn.ending is not Ending.LATE:
            await self.link.get().renew(lease.lease)
        if turn.ending is Ending.DIE:
            await self.write(turn, lease, names, layers=self.rng.randrange(LAYOUT.layers))
            self.tally.counts["died"] += 1
            return True
        if turn.ending is Ending.LATE:
            await asyncio.sleep(turn.lease_s + self.rng.random() * 40.0)
            await self.write_late(turn, lease, names)
            return True
        await self.write(turn, lease, names)
        copied = [copy.source for copy in lease.copies]
        rest = names[len(known) :]
        slots = [*range(len(rest)), *range(len(lease.targets), len(lease.targets) + len(copied))]
        for _ in range(2 if turn.twice else 1):
            await self.link.get().commit(lease.lease, slots, [*rest, *(names[source] for source in copied)])
        self.tally.counts["committed"] += len(slots)
        good = await self.verified(lease.targets[: len(rest)], rest, troubles)
        if good < len(rest):
            await self.link.get().discard(lease.targets[good : len(rest)])
        if turn.slander and lease.sources:
            await self.link.get().discard(lease.sources[-1:])
        return turn.ending is Ending.FORGET

    async def write(self, turn: Turn, lease: Lease, names: list[BlockHash], layers: int = LAYOUT.layers) -> None:
        """The blocks that were not cached, the tail (of any bytes), and copies of the sources."""
        rest = [bytes_of(name) for name in names[len(lease.sources) :]]
        tail = [np.full_like(bytes_of(names[0]), 7)] * (len(lease.targets) - len(rest))
        copies = [bytes_of(names[copy.source]) for copy in lease.copies]
        blocks = [*rest, *tail, *copies]
        grants = [*lease.targets, *(copy.target for copy in lease.copies)]
        if not blocks:
            return
        if turn.whole and layers == LAYOUT.layers:
            await self.mover.write_blocks(grants, blocks, Priority.WRITE_BACK)
            return
        for layer in range(layers):
            source = np.stack([block[layer] for block in blocks])
            await self.mover.write(layer, grants, source, range(len(blocks)), Priority.STORE)
            await asyncio.sleep(turn.pause_s / 4)

    async def write_late(self, turn: Turn, lease: Lease, names: list[BlockHash]) -> None:
        """As a process that was paused beyond its lease. Whatever becomes of the write, nothing is committed."""
        slots = [(grant.segment, grant.slot) for grant in lease.targets]
        slots += [(copy.target.segment, copy.target.slot) for copy in lease.copies]
        self.tally.late.update(slots)
        try:
            with contextlib.suppress(DangoError):
                await self.write(replace(turn, pause_s=0.0), lease, names)
        finally:
            self.tally.late.subtract(slots)
        try:
            await self.link.get().commit(lease.lease, [0], names[-1:])
            self.tally.wrong.append("a late commit was taken")
        except LeaseLost:
            self.tally.counts["late"] += 1
        except DangoError:
            self.tally.counts["late, unheard"] += 1

    async def verified(self, grants: Sequence[Grant], names: Sequence[BlockHash], troubles: int) -> int:
        """How many leading blocks are there in all layers. Fewer than all, though nothing happened, is a loss."""
        if not grants:
            return 0
        best = 0
        for _ in range(TRIES):
            good = len(grants)
            for layer in range(LAYOUT.layers):
                out = np.full((good, LAYOUT.run_bytes), 0xEE, np.uint8)
                good = await self.mover.read(layer, grants[:good], out, range(good), Priority.LOAD)
                for row, name in enumerate(names[:good]):
                    if not np.array_equal(out[row], bytes_of(name)[layer]):
                        self.tally.wrong.append(f"layer {layer} of {name.hex()[:8]} in {grants[row]}")
                if not good:
                    break
            best = max(best, good)
            if best == len(grants):
                self.tally.counts["verified"] += best
                return best
        self.tally.counts["unread"] += 1
        first = grants[best]
        calm = troubles == self.tally.troubles and troubles % 2 == 0
        if calm and not self.tally.late[first.segment, first.slot]:
            self.tally.wrong.append(f"lost: {names[best].hex()[:8]} in {first}")
        return best

    async def again(self, call: Callable[[], Awaitable[T]], quiet: bool) -> T | None:
        """Ask until it is answered: for what may be asked twice."""
        for _ in range(TRIES):
            try:
                return await call()
            except PeerLost:
                await asyncio.sleep(0.1)
            except DangoError as error:
                self.tally.counts[f"again {type(error).__name__}"] += 1
        if not quiet:
            raise PeerLost("no answer, however often it was asked")
        return None
