"""The registry over real sockets: who joins, who is given up, what garbage does."""

import asyncio

import zmq
import zmq.asyncio

from protocol.registry import DEAD_AFTER_S, Pool
from tests.cluster import a_cluster, an_ask
from tests.fakes import foretell

PROMPT = [(11 * i) % 101 for i in range(22)]


async def test_garbage_at_the_control_port_is_counted_and_disturbs_nobody():
    async with a_cluster() as cluster:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(cluster.control)
        for frames in ([b"GET / HTTP/1.1"], [b"\x96\x01", b"x"], [b""] * 20):
            await socket.send_multipart(frames)
        async with asyncio.timeout(5):
            while cluster.counted("dango:bad_frames_total") < 3:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.05)
        assert (await cluster.serve(an_ask(PROMPT, 4))).tokens[0] == foretell(PROMPT, 4)
        socket.close(0)
        context.destroy(linger=0)


async def test_an_instance_that_falls_silent_is_given_up_and_its_successor_taken_in():
    """B49: killed without a word; the next life under the same name is found at once."""
    async with a_cluster() as cluster:
        (first,) = cluster.view.of(Pool.DECODE)
        await cluster.kill("decode-0")
        async with asyncio.timeout(DEAD_AFTER_S + 2):
            while cluster.view.of(Pool.DECODE):  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.05)
        assert not cluster.dispatcher.readiness().ready
        cluster.start_decode("decode-0")
        await cluster.ready(3)
        (second,) = cluster.view.of(Pool.DECODE)
        assert second.incarnation != first.incarnation
        assert (await cluster.serve(an_ask(PROMPT, 4))).tokens[0] == foretell(PROMPT, 4)
