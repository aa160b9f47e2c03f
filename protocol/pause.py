"""Was it they who were silent, or we who did not listen? A loop that was stopped must not blame its peers."""

import asyncio


async def sleep_unless_paused(seconds: float) -> bool:
    """Sleep; True if it was about as long as asked for, False if the whole process had a pause meanwhile.

    After a pause (SIGSTOP, a suspended machine, a blocked loop) what others sent lies unread, so their silence
    means nothing until it has been read.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.sleep(seconds)
    return loop.time() - began < 2 * seconds
