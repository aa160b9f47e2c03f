"""What a service leaves on its machine: nothing."""

import fcntl
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.runtime import (
    LOCK_NAME,
    NoRuntimeFolder,
    PortTaken,
    base_url,
    claim_port,
    remove_shm,
    runtime_folder,
    shm_files,
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go meanwhile."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_private_and_goes_away(temporary: Path) -> None:
    with runtime_folder() as folder:
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "conductor.sock").touch()
    assert list(temporary.iterdir()) == []


def test_the_folder_goes_away_after_an_error_too(temporary: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), runtime_folder():
        raise RuntimeError("boom")
    assert list(temporary.iterdir()) == []


def test_what_a_killed_supervisor_left_is_swept_and_what_lives_is_not(temporary: Path) -> None:
    dead, strange = temporary / "dango-dead", temporary / "dango-strange"
    for folder in (dead, strange):
        folder.mkdir()
    (dead / LOCK_NAME).touch()
    with runtime_folder() as living, runtime_folder():
        assert living.exists()
        assert not dead.exists()
        assert strange.exists(), "no lock file: none of ours"


def test_the_lock_is_held_while_the_folder_lives(temporary: Path) -> None:
    with runtime_folder() as folder, (folder / LOCK_NAME).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_told_in_a_sentence(taken_port: int) -> None:
    with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1 port {taken_port}: Address already in use"):
        claim_port("127.0.0.1", taken_port)


def test_an_address_of_another_machine_is_told_in_a_sentence() -> None:
    with pytest.raises(PortTaken, match=r"cannot listen on 192\.0\.2\.1 port 8000: .*Give --host"):
        claim_port("192.0.2.1", 8000)


def test_a_name_of_no_machine_is_told_in_a_sentence() -> None:
    with pytest.raises(
        PortTaken, match=r"cannot listen on nosuchhost\.invalid: the name is not known.*Give --host"
    ):
        claim_port("nosuchhost.invalid", 8000)


@pytest.fixture
def shallow() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dt-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("more", [0, 1])
def test_the_longest_socket_can_be_bound_or_the_folder_is_refused(
    shallow: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    most = 107 - len("/dango-12345678/kvcache-63.sock")
    parent = shallow / ("x" * (most - len(f"{shallow}/") + more))
    parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    if not more:
        with runtime_folder() as folder, socket.socket(socket.AF_UNIX) as longest:
            longest.bind(str(folder / "kvcache-63.sock"))
    else:
        with pytest.raises(NoRuntimeFolder, match="set the environment variable TMPDIR"), runtime_folder():
            pass
        assert list(parent.iterdir()) == []


def test_port_0_takes_a_free_one() -> None:
    port = claim_port("127.0.0.1", 0)
    assert port > 0
    assert claim_port("127.0.0.1", port) == port


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_where_a_client_here_reaches_it(host: str, url: str) -> None:
    assert base_url(host, 8000) == url


def test_shared_memory_of_a_process_is_found_and_removed() -> None:
    path = Path(f"/dev/shm/dango-test-{os.getpid()}")
    try:
        with path.open("w+b") as file:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096):
                assert path in shm_files(os.getpid())
        assert path not in shm_files(os.getpid())
        remove_shm({path, Path("/dev/shm/dango-not-there")})
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_only_shared_memory_is_removed(tmp_path: Path) -> None:
    (tmp_path / "dango-x").touch()
    remove_shm({tmp_path / "dango-x"})
    assert (tmp_path / "dango-x").exists()


def test_a_process_that_is_gone_has_none() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(10)
    assert shm_files(done.pid) == set()
