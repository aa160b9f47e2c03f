"""The frame of every process: settings in, one coroutine that runs until a signal, logs of one line an event."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.errors import DangoError
from protocol.settings import SettingsError, add_flags, load_section

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

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


def run_service(
    name: str,
    section: type[T],
    serve: Callable[[T], Coroutine[Any, Any, None]],
    *,
    teaches: str,
    argv: Sequence[str] | None = None,
) -> int:
    """The `main` of a service: read its section, run `serve(config)`. Returns the exit code.

    What a person can mend (a setting, a model, an address, a cluster that this instance does not fit) ends
    the process with one sentence on standard error and code 1, or 2 for a setting.
    """
    parser = argparse.ArgumentParser(f"dango {name}", description=teaches)
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"settings in TOML; this reads [{name}]")
    add_flags(parser, section)
    flags = parser.parse_args(argv)
    try:
        config = load_section(section, name, flags=flags, environ=os.environ, file=flags.config)
    except SettingsError as error:
        parser.exit(2, f"dango {name}: {error}\n")
    configure_logging(getattr(config, "log_level", "info"))
    try:
        return run_process(serve(config))
    except (DangoError, OSError, ValueError) as error:
        logging.getLogger(f"dango.{name}").error("cannot go on: %s", error)
        return 1
