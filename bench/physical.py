"""What the machine itself can do: a copy in memory by one thread, and bytes over a loopback socket.

`python -m bench.physical` is the other end of the socket: it answers (offset, size) with so many bytes of its
memory, as the plainest server would. It ends when its connection does.
"""

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

ASK = struct.Struct("<QQ")
START_S = 30.0
STOP_S = 10.0

Bytes = npt.NDArray[np.uint8]


def copy_s(target: Bytes, source: Bytes) -> float:
    """Seconds of one copy by one thread."""
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


class RawSocket:
    """A connection to the other end. `get` is a request and a reply."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def get(self, offset: int, out: memoryview) -> None:
        """Receive so many bytes as `out` has, from `offset` of the other end's memory."""
        self._sock.sendall(ASK.pack(offset, len(out)))
        while out:
            got = self._sock.recv_into(out)
            if not got:
                raise ConnectionError("the other end of the raw socket is gone")
            out = out[got:]


@contextmanager
def raw_socket(size: int) -> Iterator[RawSocket]:
    """To a process with `size` bytes of memory."""
    argv = [sys.executable, "-m", "bench.physical", str(size)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=START_S) as sock:
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield RawSocket(sock)
            process.wait(STOP_S)
        finally:
            process.kill()


def main() -> None:
    """The other end."""
    memory = np.random.default_rng(0).integers(0, 256, int(sys.argv[1]), np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(START_S)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        sock, _ = listener.accept()
    with sock:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(head := sock.recv(ASK.size, socket.MSG_WAITALL)) == ASK.size:
            offset, size = ASK.unpack(head)
            sock.sendall(memory[offset : offset + size])


if __name__ == "__main__":
    main()
