"""One instance under supervision: started, listened to, started again when it dies, ended."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESTARTS_MAX = 5
"""In a row: what fails six times at once fails for a reason that a seventh try does not mend."""

RESTART_DELAY_S = 0.5
"""Before the first restart; doubles with each further one in a row, to 8 s."""

FORGIVEN_AFTER_S = 60.0
"""A life this long shows that the start worked: the count of restarts begins anew."""

UNSHOWN_LINES = 20
"""Of an instance's output below a warning, kept to be shown when it dies."""

LINE_BYTES_MAX = 16 << 10
"""A longer line of output is cut into several: an instance gone mad must not fill our memory."""

KILL_S = 5.0
"""The kernel ends a process within this time of SIGKILL, unless it hangs in a driver."""

LEVEL = re.compile(r"^.{0,40}? (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Command:
    """What to run: `python ARGUMENTS...` as `name`, with variables added to the environment."""

    name: str
    arguments: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


class Died(Exception):
    """An instance ended that should have gone on; the text says which, how, and what it said."""


class Instance:
    """Owns one process at a time, in a session of its own, so that a terminal's Ctrl-C reaches only us.

    `keep` runs until `stop` was called and the process has ended; the output is read all the while.
    """

    def __init__(
        self,
        command: Command,
        tell: Tell,
        *,
        log_file: Path | None = None,
        verbose: bool = False,
        restart_delay_s: float = RESTART_DELAY_S,
    ) -> None:
        self.command = command
        self.restartable = False
        """Set once the service was ready: before that a death is an error to be shown, not to be repeated."""
        self.restarts = 0
        """Since the start of the supervisor."""
        self._tell = tell
        self._log_file = log_file
        self._verbose = verbose
        self._restart_delay_s = restart_delay_s
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._unshown: deque[str] = deque(maxlen=UNSHOWN_LINES)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def keep(self) -> None:
        """Run, and run again. Raises Died."""
        in_a_row = 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            code = await self._live()
            if self._stopping.is_set():
                return
            in_a_row = 1 if loop.time() - started > FORGIVEN_AFTER_S else in_a_row + 1
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            if not self.restartable or in_a_row > RESTARTS_MAX:
                raise Died(f"{self.command.name} ended ({how}). {self._last_words()}")
            delay_s = self._restart_delay_s * 2 ** (in_a_row - 1)
            again = f"starting it again in {delay_s:g} s (restart {in_a_row} of {RESTARTS_MAX} in a row)"
            self._tell(f"dango: {self.command.name} ended ({how}); {again}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            self.restarts += 1

    async def stop(self, within_s: float) -> None:
        """SIGTERM; SIGKILL when that does not end it in time. Returns when it has ended."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            self._tell(f"dango: {self.command.name} did not end within {within_s:g} s; killing it")
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, to it and whatever it started."""
        self._stopping.set()
        process = self._process
        if process is not None and process.returncode is None:
            self._signal(signal.SIGKILL)
            async with asyncio.timeout(KILL_S):
                await process.wait()

    async def _live(self) -> int:
        """One life of the process, from start to end. Returns its exit code."""
        argv = [sys.executable, "-m", "deploy.leash", str(os.getpid()), *self.command.arguments]
        self._process = process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env={**os.environ, **self.command.environ},
            start_new_session=True,
        )
        if self._stopping.is_set():  # asked to stop while it was being started
            self._signal(signal.SIGKILL)
        await self._listen(process)
        return await process.wait()

    async def _listen(self, process: Process) -> None:
        assert process.stdout is not None
        with self._log_file.open("ab") if self._log_file else contextlib.nullcontext() as log:
            shown, rest = True, b""
            while piece := await process.stdout.read(LINE_BYTES_MAX):
                if log is not None:
                    log.write(piece)
                    log.flush()
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > LINE_BYTES_MAX:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    shown = self._hear(line.decode(errors="replace"), shown)
            if rest:
                self._hear(rest.decode(errors="replace"), shown)

    def _hear(self, line: str, shown: bool) -> bool:
        """Keep a line, and show it if it deserves it. A line without a level goes with the one before."""
        level = LEVEL.match(line)
        if level is not None:
            shown = self._verbose or level[1] not in ("DEBUG", "INFO")
        if shown:
            self._tell(f"{self.command.name} | {line}")
        else:
            self._unshown.append(line)
        return shown

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        lines = "\n".join(f"  {line}" for line in self._unshown)
        return f"What it said besides:\n{lines}" if lines else "See above for what it said."
