"""The instances of one service together: up, ready, kept up, drained and down."""

import asyncio
import json
import signal
from collections.abc import Callable, Sequence

import aiohttp

from deploy.instance import Instance, Tell
from deploy.runtime import remove_shm, shm_files

ASK_READY_EVERY_S = 0.2
"""The Conductor cannot call us: we ask, as a load balancer would."""

ASK_S = 5.0
"""One question. The Conductor answers it from memory."""


class NotReady(Exception):
    """The service could not serve requests within its time; the text says what was missing."""


class Fleet:
    """Runs instances until a signal or a death that no restart mends.

    The first instance is the Conductor: it is stopped first, and drains, while the others still work.
    """

    def __init__(
        self, instances: Sequence[Instance], url: str, tell: Tell, *, drain_s: float, stop_s: float
    ) -> None:
        """`tell` hears what a signal leads to."""
        self._instances = instances
        self._tell = tell
        self._url = url
        self._drain_s = drain_s
        self._stop_s = stop_s
        self._asked = asyncio.Event()
        self._asked_again = asyncio.Event()

    async def run(self, ready_s: float, on_ready: Callable[[], None]) -> None:
        """Start all, call `on_ready` once requests can be served, and return when all have ended.

        SIGINT and SIGTERM stop it; a second one kills. Raises Died or NotReady, also after all have ended.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        keeps = [asyncio.create_task(instance.keep()) for instance in self._instances]
        main = asyncio.create_task(self._up(ready_s, on_ready))
        try:
            ended, _ = await asyncio.wait((main, *keeps), return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            main.cancel()
            await self._down()
            await asyncio.gather(main, *keeps, return_exceptions=True)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    async def _up(self, ready_s: float, on_ready: Callable[[], None]) -> None:
        """Returns when asked to stop. Raises NotReady."""
        ready = asyncio.create_task(self._until_ready(ready_s))
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait((ready, asked), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return
            ready.result()
            for instance in self._instances:
                instance.restartable = True
            on_ready()
            await asked
        finally:
            for task in (ready, asked):
                task.cancel()
            await asyncio.gather(ready, asked, return_exceptions=True)

    async def _until_ready(self, within_s: float) -> None:
        missing = "the conductor does not answer"
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with asyncio.timeout(within_s), aiohttp.ClientSession(timeout=timeout) as session:
                while True:
                    answer = await _ask_ready(session, f"{self._url}/ready")
                    if answer is None:
                        return
                    missing = answer or missing
                    await asyncio.sleep(ASK_READY_EVERY_S)
        except TimeoutError:
            raise NotReady(f"not ready after {within_s:g} s: {missing}") from None

    async def _down(self) -> None:
        """Conductor first, then all others at once. A second signal cuts all waiting short."""
        files = {file for instance in self._instances if instance.pid for file in shm_files(instance.pid)}
        try:
            await self._stop_all()
        finally:
            remove_shm(files)  # of those that were killed; the others have removed their own

    async def _stop_all(self) -> None:
        """Raises TimeoutError if a process outlives even SIGKILL."""
        order = asyncio.create_task(self._stop_in_order())
        again = asyncio.create_task(self._asked_again.wait())
        try:
            await asyncio.wait((order, again), return_when=asyncio.FIRST_COMPLETED)
            if again.done():
                order.cancel()
                await asyncio.gather(*(instance.kill() for instance in self._instances))
            else:
                order.result()
        finally:
            again.cancel()
            await asyncio.gather(order, again, return_exceptions=True)

    async def _stop_in_order(self) -> None:
        conductor, *others = self._instances
        await conductor.stop(self._drain_s + self._stop_s)
        await asyncio.gather(*(instance.stop(self._stop_s) for instance in others))

    def _on_signal(self) -> None:
        if not self._asked.is_set():
            self._asked.set()
            self._tell(f"dango: stopping; running requests have {self._drain_s:g} s (Ctrl-C again: at once)")
        elif not self._asked_again.is_set():
            self._asked_again.set()
            self._tell("dango: stopping at once")


async def _ask_ready(session: aiohttp.ClientSession, url: str) -> str | None:
    """None when ready; what is missing, as far as one can tell."""
    try:
        async with session.get(url) as response:
            if response.status == 200:
                return None
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return ""
    return _missing(text)


def _missing(text: str) -> str:
    """The sentences in the Conductor's answer, or the answer as it is."""
    try:
        match json.loads(text):
            case {"missing": [*sentences]}:
                return "; ".join(map(str, sentences))
    except ValueError:
        pass
    return text.strip()
