"""`dango kvcache drain`: begin the drain of a segment, or end it, and wait until the segment is empty.

The drain goes on whether anybody waits for it or not; to be told again, give the command again.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache_pool.api import SegmentStats
from kvcache_pool.client import KVCachePool
from protocol.errors import DangoError
from protocol.ids import SegmentId

WAIT_S = 600.0
"""How long the command waits if it is not told."""

LOOK_EVERY_S = 0.5
"""As often as segments announce themselves."""


@dataclass(frozen=True)
class Outcome:
    """How far a drain has come, or why nobody can tell."""

    segment: SegmentId
    drained: bool
    blocks: int
    """That are left in it."""
    why: str
    """They are still there."""
    ended: bool = False
    """Whether somebody has ended the drain meanwhile."""


def outcome_of(segment: SegmentId, there: Sequence[SegmentStats]) -> Outcome | None:
    """From the counts of all segments. None while this one is not there."""
    one = next((one for one in there if one.segment == segment), None)
    if one is None:
        return None
    blocks = one.total - one.free
    if not one.draining:
        return Outcome(segment, False, blocks, "somebody has ended the drain", ended=True)
    parts = {"in use": one.leased, "being written": blocks - one.cached, "pinned": one.pinned}
    told = [f"{count} {what}" for what, count in parts.items() if count]
    if not any(not other.draining and not other.on_disk for other in there):
        told.append("no other memory is there to take them")
    detail = f" ({', '.join(told)})" if told else ""
    return Outcome(segment, not blocks, blocks, f"blocks left: {blocks}{detail}" if blocks else "")


async def drain(pool: KVCachePool, segment: SegmentId, wait_s: float, tell: Callable[[str], None]) -> Outcome:
    """Begin it, and wait until it is done, or so long. `tell` hears of progress. A directory that restarts
    meanwhile is waited for. Raises ValueError, or CannotDrain."""
    if not 0.0 <= wait_s < math.inf:
        raise ValueError(f"--wait is 0 or more seconds, not {wait_s:g}")
    now = asyncio.get_running_loop().time
    blocks, end = await pool.drain(segment), now() + wait_s
    told, lost = "", False
    while True:
        try:
            if lost:  # a directory that restarts within half a second of the command may not have it
                await pool.drain(segment)
            lost, seen = False, outcome_of(segment, await pool.segments())
        except DangoError as error:
            lost, seen = True, Outcome(segment, False, blocks, str(error))
        outcome = seen or Outcome(segment, False, blocks, "it is not there now")
        blocks = outcome.blocks
        if outcome.drained or outcome.ended or now() >= end:
            return outcome
        if outcome.why != told:
            told = outcome.why
            tell(told)
        await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, end - now())))
