"""How many may be connected to a ZeroMQ socket that listens, and subscribe to how much. ZeroMQ itself takes all.

The socket's monitor tells of each connection by its descriptor. One too many is shut down here, and ZeroMQ then
takes it apart as if the other side had ended it: all that was kept for it is freed.
"""

import os
import socket

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_S = 2.0
"""For a connection to say what it is: who says nothing is no listener."""

TOPICS_MAX = 16
"""Subscriptions of one connection: a listener has one, or one for each pool that it knows."""


class Door:
    """Of one listening socket. Owns its monitor until `close`, which comes before the socket's."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", listener: "zmq.Socket[bytes]", most: int
    ) -> None:
        """Before the listener is bound, so that nobody is missed."""
        self._most = most
        self._listener = listener
        self._topics: dict[int, int] = {}
        """Of each connection that is open, how many it subscribes to."""
        self.refused = 0
        """Connections that were ended here."""
        listener.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
        name = f"inproc://door-{id(self)}"
        listener.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.connect(name)

    def __len__(self) -> int:
        """Connections that are open, as far as `watch` has heard."""
        return len(self._topics)

    def watch(self) -> None:
        """Hear who came and went, and end those that are too many: the last. Never waits."""
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._topics.pop(descriptor, None)
                continue
            self._topics[descriptor] = 0
            if len(self._topics) > self._most:
                self._end(descriptor)

    def subscribed(self, descriptor: int, change: int) -> None:
        """This connection subscribes to one topic more or less; to too many, and it is ended."""
        if descriptor not in self._topics:
            self.watch()  # it came after the last time
        if descriptor in self._topics:  # else it has gone
            self._topics[descriptor] += change
            if self._topics[descriptor] > TOPICS_MAX:
                self._end(descriptor)

    def _end(self, descriptor: int) -> None:
        """Forget it at once: what is said of it later is of no use."""
        del self._topics[descriptor]
        self.refused += 1
        end_connection(descriptor, self._listener.getsockopt_string(zmq.LAST_ENDPOINT))

    def close(self) -> None:
        """Hear no more."""
        self._listener.disable_monitor()
        self._monitor.close(0)


def end_connection(descriptor: int, endpoint: str) -> None:
    """Shut down a connection of the socket that listens at `endpoint`. The descriptor may have been closed by now,
    and be another file's: nothing happens to that."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            here = connection.getsockname()
            ours = endpoint.removeprefix("ipc://") if isinstance(here, str) else endpoint.rpartition(":")[2]
            if ours == (here if isinstance(here, str) else str(here[1])):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already, or no socket
        return
