"""Telling a silence of others from a pause of our own."""

import asyncio
import time

from protocol.pause import sleep_unless_paused


async def test_an_ordinary_sleep_is_no_pause():
    assert await sleep_unless_paused(0.2)


async def test_a_loop_that_was_stopped_meanwhile_knows_it():
    asyncio.get_running_loop().call_later(0.01, lambda: time.sleep(0.5))  # as SIGSTOP does, for all tasks at once
    assert not await sleep_unless_paused(0.2)
