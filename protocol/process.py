"""The frame of every process: one coroutine that runs until a signal, and logs of one line an event."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from typing import Any

FIELDS_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Logfmt(logging.Formatter):
    """`time level logger: message key=value ...`; the keys are what the caller passed as `extra`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        extra = {key: value for key, value in vars(record).items() if key not in FIELDS_OF_EVERY_RECORD}
        line = super().format(record)
        return line + "".join(f" {key}={value}" for key, value in extra.items())


def configure_logging(level: str) -> None:
    """Send all logs of this process to standard error, at `level` (debug, info, warning, error) and above."""
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def run_process(main: Coroutine[Any, Any, None]) -> int:
    """Run `main` until it returns or SIGTERM or SIGINT cancels it. Returns the exit code.

    `main` drains in its own `finally` or `except CancelledError`; a second signal cancels that too.
    """

    async def until_signal() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        await main

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(until_signal())
    return 0
