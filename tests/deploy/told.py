"""A listener to the supervisor."""

import asyncio
from collections.abc import Callable


class Told:
    """What the supervisor said, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._more.set()

    async def until(self, condition: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition(self.lines):
                self._more.clear()
                await self._more.wait()

    async def ups(self, count: int) -> None:
        """Until so many processes have said that they are up."""
        await self.until(lambda lines: sum("test: up" in line for line in lines) >= count)
