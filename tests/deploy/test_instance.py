"""One process under supervision: its life, its deaths, its words."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from deploy.instance import LINE_BYTES_MAX, RESTARTS_MAX, Command, Died, Instance
from tests.deploy.told import Told

ROOT = Path(__file__).resolve().parents[2]

LIVE = "import time; print('2026-01-01 00:00:00,000 WARNING test: up', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {LIVE}"


def python(code: str) -> Command:
    return Command("prefill-0", ["-c", code])


@contextlib.asynccontextmanager
async def kept(instance: Instance) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(instance.keep())
    try:
        yield task
    finally:
        await instance.kill()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_runs_in_a_session_of_its_own_until_stopped() -> None:
    told = Told()
    instance = Instance(python(LIVE), told)
    async with kept(instance) as task:
        await told.ups(1)
        pid = instance.pid
        assert pid is not None
        assert os.getsid(pid) == pid != os.getsid(0)
        await instance.stop(5)
        await task
        assert instance.pid is None
        assert not psutil.pid_exists(pid)


async def test_a_stubborn_one_is_killed_and_that_is_told() -> None:
    told = Told()
    instance = Instance(python(STUBBORN), told)
    async with kept(instance) as task:
        await told.ups(1)
        await instance.stop(0.2)
        await task
    assert "dango: prefill-0 did not end within 0.2 s; killing it" in told.lines


async def test_a_death_before_ready_is_final_and_shows_what_was_said() -> None:
    code = "import sys; print('2026-01-01 00:00:00,000 INFO test: loading'); sys.exit(3)"
    with pytest.raises(Died, match=r"(?s)prefill-0 ended \(exit code 3\).*INFO test: loading"):
        await Instance(python(code), Told()).keep()


async def test_after_ready_it_is_started_again() -> None:
    told = Told()
    instance = Instance(python(LIVE), told, restart_delay_s=0.01)
    instance.restartable = True
    async with kept(instance):
        for life in (1, 2):
            await told.ups(life)
            assert instance.pid is not None
            os.kill(instance.pid, signal.SIGKILL)
        await told.ups(3)
        assert instance.restarts == 2
    again = [line for line in told.lines if "again" in line]
    assert again == [
        "dango: prefill-0 ended (killed by SIGKILL); starting it again in 0.01 s (restart 1 of 5 in a row)",
        "dango: prefill-0 ended (killed by SIGKILL); starting it again in 0.02 s (restart 2 of 5 in a row)",
    ]


async def test_restarts_in_a_row_are_limited() -> None:
    told = Told()
    instance = Instance(python("raise SystemExit('no such model')"), told, restart_delay_s=0.001)
    instance.restartable = True
    with pytest.raises(Died, match="exit code 1"):
        await instance.keep()
    assert instance.restarts == RESTARTS_MAX
    assert told.lines.count("prefill-0 | no such model") == RESTARTS_MAX + 1


async def test_stopping_ends_the_wait_for_a_restart() -> None:
    told = Told()
    instance = Instance(python("raise SystemExit(1)"), told, restart_delay_s=60)
    instance.restartable = True
    async with kept(instance) as task:
        await told.until(lambda lines: any("again" in line for line in lines))
        await instance.stop(1)
        async with asyncio.timeout(1):
            await task


TALK = """
import sys
say = lambda text: print('2026-01-01 00:00:00,000 ' + text, flush=True)
say('INFO a: calm')
say('WARNING a: careful')
print('  more of the warning')
say('DEBUG a: detail')
print('  more of the detail')
say('ERROR a: bad')
"""


async def test_warnings_are_shown_with_what_belongs_to_them() -> None:
    told = Told()
    with pytest.raises(Died, match="calm"):
        await Instance(python(TALK), told).keep()
    shown = [line.removeprefix("prefill-0 | ").removeprefix("2026-01-01 00:00:00,000 ") for line in told.lines]
    assert shown == ["WARNING a: careful", "  more of the warning", "ERROR a: bad"]


async def test_all_is_shown_when_verbose_and_all_goes_to_the_log(tmp_path: Path) -> None:
    told, log = Told(), tmp_path / "prefill-0.log"
    with pytest.raises(Died, match="See above"):
        await Instance(python(TALK), told, log_file=log, verbose=True).keep()
    assert len(told.lines) == 6
    assert [f"prefill-0 | {line}" for line in log.read_text().splitlines()] == told.lines


async def test_endless_lines_and_broken_text_do_no_harm() -> None:
    told = Told()
    code = f"import sys; sys.stdout.buffer.write(b'x' * {3 * LINE_BYTES_MAX} + b'\\xff\\n' + b'end')"
    with pytest.raises(Died):
        await Instance(python(code), told).keep()
    assert told.lines[-1] == "prefill-0 | end"
    assert sum(line.count("x") for line in told.lines[:-1]) == 3 * LINE_BYTES_MAX
    assert max(map(len, told.lines)) < 3 * LINE_BYTES_MAX


async def test_its_environment_has_what_the_command_adds() -> None:
    told = Told()
    code = "import os; print(os.environ['OMP_NUM_THREADS'], 'PATH' in os.environ)"
    with pytest.raises(Died):
        await Instance(Command("x", ["-c", code], {"OMP_NUM_THREADS": "3"}), told).keep()
    assert told.lines == ["x | 3 True"]


PARENT = """
import asyncio, sys
from deploy.instance import Command, Instance

def tell(line):
    print(instance.pid, flush=True)

instance = Instance(Command("x", ["-c", sys.argv[1]]), tell)
asyncio.run(instance.keep())
"""


def test_it_does_not_outlive_a_killed_supervisor() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, LIVE], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(10)
    gone, alive = psutil.wait_procs([child], timeout=5)
    assert ([process.pid for process in gone], alive) == ([child.pid], [])


def test_it_does_not_start_when_its_supervisor_is_gone_already() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.leash", "1", "-c", "print('started')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "process 1, is gone" in done.stderr
