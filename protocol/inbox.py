"""What has arrived and was not taken yet, in order, for the one task that takes it."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """First in, first out; at most one task waits in `get`. It has no bound: whoever fills it knows how much there
    can be. Quicker than asyncio.Queue, which every token would pass. Mutates: put, get."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Something arrives."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> T:
        """The next thing that arrived; waits for it."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()
