"""Runs `python ARGUMENTS...` so that it cannot outlive the process that started it.

    python -m deploy.leash PARENT_PID -m prefill_pool --instance prefill-0 ...

The kernel sends SIGTERM to the program when its parent dies, SIGKILL of the parent included. A signal
set between fork and exec would do the same, but Python code there is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, arguments: list[str]) -> None:
    """Become the program. Returns only by raising OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"the supervisor, process {parent}, is gone")  # it died before the kernel knew of our wish
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
