"""Virtual time: an asyncio loop that never waits, but moves its clock to the next timer instead.

Whatever reads time only through the running loop runs here unchanged, an hour in seconds. With one seed the
order of all events is the same each time: nothing here depends on the machine's clock.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing is ready and no timer is set: somebody waits for what will never come."""


class _Leap(selectors.SelectSelector):
    """A selector that takes waiting for done."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move the clock by what the loop would have waited."""
        if timeout is None:
            raise Stuck("no task can go on, and no timer is set")
        if timeout > 0.0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Threads and sockets have no place in it."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._leap.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a new virtual loop, and cancel what it left behind. Raises Stuck."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
