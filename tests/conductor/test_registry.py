"""The registry over real sockets: who joins, who is given up, what garbage does."""

import asyncio
import time

import zmq
import zmq.asyncio

from conductor.estimate import Estimates
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.registry import Registry
from kvcache_pool.api import DirectoryLink
from protocol.ids import Incarnation
from protocol.registry import DEAD_AFTER_REPORTS, REPORT_EVERY_S, Load, Pool, Report, Timing
from protocol.zmq_transport import ZmqTransport
from tests.cluster import Listener, a_cluster, an_ask
from tests.conductor.test_view import a_view, the
from tests.fakes import foretell

PROMPT = [(11 * i) % 101 for i in range(22)]


DEAD_AFTER_S = DEAD_AFTER_REPORTS * REPORT_EVERY_S


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
        assert (await cluster.serve(an_ask(PROMPT, 4))).said[0] == foretell(PROMPT, 4)
        socket.close(0)
        context.destroy(linger=0)


async def test_a_redis_that_is_away_is_a_series_of_its_own_and_no_fault_of_the_service():
    async with a_cluster() as cluster:
        roster = cluster.dispatcher._registry._roster
        assert cluster.counted("dango:degraded") == 0
        for fault, told in (("Redis did not answer within 1 s", 1), ("", 0)):
            roster.silence(fault)
            async with asyncio.timeout(5):
                while cluster.counted("dango:degraded") != told:  # noqa: ASYNC110 - a test may poll
                    await asyncio.sleep(0.05)
            assert cluster.dispatcher.readiness().ready


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
        assert (await cluster.serve(an_ask(PROMPT, 4))).said[0] == foretell(PROMPT, 4)


async def test_a_pause_of_the_conductor_is_not_held_against_its_instances():
    """Stopped for longer than DEAD_AFTER_S, with all reports unread: nobody is given up, and streams go on."""
    async with a_cluster(layer_s=0.002) as cluster:
        reply = Listener()
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 60), reply))
        await reply.spoke.wait()
        lives = [instance.incarnation for pool in Pool for instance in cluster.view.of(pool)]
        for instance in (i for pool in Pool for i in cluster.view.of(pool)):
            instance.heard_at -= DEAD_AFTER_S  # as if the reports of a pause had not been read yet
        time.sleep(1.2)  # noqa: ASYNC251 - the pause itself, of all in this process
        await task
        assert reply.said[0] == foretell(PROMPT, 60)
        assert [i.incarnation for pool in Pool for i in cluster.view.of(pool)] == lives


async def test_an_instance_whose_connection_breaks_leaves_the_gauges_too():
    async with a_cluster(layer_s=0.005) as cluster:
        reply = Listener()
        task = asyncio.create_task(cluster.serve(an_ask(PROMPT, 60), reply))
        await reply.spoke.wait()
        up = {"model_name": "fake", "pool": "decode"}
        async with asyncio.timeout(5):
            while not cluster.metrics.registry.get_sample_value("dango:instances_up", up):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await cluster.kill("decode-0")
        await asyncio.gather(task, return_exceptions=True)
        assert cluster.metrics.registry.get_sample_value("dango:instances_up", up) == 0


async def test_a_report_teaches_how_long_passes_take_and_one_of_an_unknown_life_does_not():
    transport, estimates = ZmqTransport(), Estimates()
    try:
        view = a_view("decode-0")
        instance = the(view, "decode-0")
        registry = Registry(view, Peers(transport), DirectoryLink(transport), Metrics("fake"), estimates)
        load = Load(timings=[Timing(1, 4, 100, 0.5)])
        assert not registry.report(Report(instance.name, Incarnation("other"), load)).known
        assert estimates.fresh(Pool.DECODE, instance.kind, asyncio.get_running_loop().time()) == 0
        assert registry.report(Report(instance.name, instance.incarnation, load)).known
        assert estimates.fresh(Pool.DECODE, instance.kind, asyncio.get_running_loop().time()) == 1
        assert abs(estimates.step(instance.kind).at(4, 100) - 0.5) < 0.01
    finally:
        transport.close()
