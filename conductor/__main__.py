"""`dango conductor`: the Conductor, built from real parts."""

import asyncio
import logging
import random
import sys
from collections.abc import Sequence

from aiohttp import web

from conductor.admission import Admission
from conductor.config import ConductorConfig
from conductor.dispatch import Dispatcher
from conductor.gateway import Gateway
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.registry import Registry
from conductor.view import View
from engine.manifest import open_model
from kvcache_pool.api import DirectoryLink
from protocol.process import run_service
from protocol.rpc import Server
from protocol.tasks import together
from protocol.zmq_transport import ZmqTransport

log = logging.getLogger("dango.conductor")


async def serve(config: ConductorConfig) -> None:
    """Serve until cancelled; then refuse newcomers and let running requests end, up to `drain_s`."""
    model = open_model(config)
    transport, metrics = ZmqTransport(), Metrics(model.manifest.model)
    view, peers, directory = View(model.manifest, config.report_s), Peers(transport), DirectoryLink(transport)
    admission = Admission(view, metrics, config, random.Random())
    registry = Registry(view, peers, directory, metrics, admission.estimates)
    dispatcher = Dispatcher(
        view, peers, directory, registry, metrics, admission, in_flight_max=config.in_flight_max
    )
    gateway = Gateway(dispatcher, model.tokenizer, model.manifest, metrics, config, random.SystemRandom())
    runner = gateway.runner()
    control = Server(transport.bind(config.listen), registry.handlers())
    expiry = registry.expire_forever(lambda: control.bad_frames)
    loops = asyncio.create_task(together([control.serve(), expiry, admission.run()]))
    try:
        await _start_http(runner, config)
        await asyncio.wait([loops])  # for ever, unless they fail
        loops.result()
    finally:
        await dispatcher.drain(config.drain_s)  # while clients still find /ready, and instances their registry
        await runner.cleanup()
        loops.cancel()
        await asyncio.gather(loops, return_exceptions=True)
        await peers.aclose()
        await directory.aclose()
        transport.close()


async def _start_http(runner: web.AppRunner, config: ConductorConfig) -> None:
    await runner.setup()
    await web.TCPSite(runner, config.host, config.port).start()
    log.info("serving", extra={"address": f"http://{config.host}:{config.port}"})


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    teaches = "The Conductor: the OpenAI-compatible endpoint, the registry, and the placement of every request."
    return run_service("conductor", ConductorConfig, serve, teaches=teaches, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
