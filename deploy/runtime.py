"""What a running service has on its machine besides processes: a private folder, a port, shared memory files."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER_PREFIX = "dango-"
LOCK_NAME = "supervisor.lock"
SHM = Path("/dev/shm")

SOCKET_PATH_BYTES_MAX = 107
"""The kernel's limit for the path of a unix socket."""

SOCKET_NAME_BYTES_MAX = len("/kvcache-63.sock")
"""The longest name of a socket in the folder."""

RANDOM_NAME_BYTES = 8
"""What `tempfile` adds to a prefix."""


A_PORT = "Another service may be running there; choose a port with --port, or let --port 0 choose."
A_HOST = "Give --host a name or address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them."


class PortTaken(Exception):
    """Somebody listens there already, or this machine does not have that address."""


class NoRuntimeFolder(Exception):
    """There is no place for our unix sockets; the text says what to set."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A folder that only this user may enter, for unix sockets; gone afterwards.

    Its lock is held as long as we live, so that a later start can tell what a killed supervisor left behind.
    Raises NoRuntimeFolder.
    """
    parent = Path(tempfile.gettempdir())
    _require_short(parent)
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # mode 0700
    try:
        with (folder / LOCK_NAME).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_short(parent: Path) -> None:
    room = SOCKET_PATH_BYTES_MAX - SOCKET_NAME_BYTES_MAX - RANDOM_NAME_BYTES - len(f"/{FOLDER_PREFIX}")
    if len(os.fsencode(parent)) > room:
        raise NoRuntimeFolder(
            f"the folder for temporary files, {parent}, has too long a path for unix sockets; set the environment "
            f"variable TMPDIR to a folder of at most {room} characters, such as TMPDIR=/tmp."
        )


def _sweep(parent: Path) -> None:
    for lock_path in parent.glob(f"{FOLDER_PREFIX}*/{LOCK_NAME}"):
        with contextlib.suppress(OSError), lock_path.open() as lock:  # OSError: held, or not ours
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock_path.stat().st_uid == os.getuid():
                shutil.rmtree(lock_path.parent, ignore_errors=True)


def claim_port(host: str, port: int) -> int:
    """The port, once it is sure that one can listen there; any free one for 0. Raises PortTaken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise PortTaken(f"cannot listen on {host}: the name is not known ({error.strerror}). {A_HOST}") from error
    except OSError as error:
        hint = A_HOST if error.errno == errno.EADDRNOTAVAIL else A_PORT
        raise PortTaken(f"cannot listen on {host} port {port}: {error.strerror or error}. {hint}") from error


def base_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a service that listens at `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def shm_files(pid: int) -> set[Path]:
    """The shared memory files of ours that a live process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()  # it has just ended
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/dango-" in line}
    return {Path(path) for path in paths if not path.endswith(" (deleted)")}


def remove_shm(files: set[Path]) -> None:
    """Remove files that their owners left behind."""
    for path in files:
        if path.is_relative_to(SHM):
            path.unlink(missing_ok=True)
