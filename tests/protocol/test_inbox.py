"""What arrives is taken in order, by the one who waits, and by nobody who has given up."""

import asyncio

import pytest

from protocol.inbox import Inbox


async def test_things_are_taken_in_the_order_in_which_they_came() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(3):
        inbox.put(number)
    assert [await inbox.get() for _ in range(3)] == [0, 1, 2]


async def test_who_waits_is_woken_by_what_comes() -> None:
    inbox: Inbox[str] = Inbox()
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.put("a")
    inbox.put("b")
    assert await waiting == "a"
    assert await inbox.get() == "b"


async def test_nothing_is_lost_with_one_who_gives_up() -> None:
    inbox: Inbox[str] = Inbox()
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.put("a")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    inbox.put("b")
    assert [await inbox.get(), await inbox.get()] == ["a", "b"]
