"""`dango conductor`: the Conductor, built from real parts."""

import asyncio
import logging
import random
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from conductor.admission import Admission
from conductor.config import ConductorConfig
from conductor.dispatch import Dispatcher
from conductor.gateway import Gateway
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.presence import Presence, expiry_s
from conductor.registry import Registry
from conductor.roster import Roster
from conductor.view import View
from engine.manifest import open_model
from kvcache_pool.api import DirectoryLink
from protocol.instance import require_reachable
from protocol.process import run_service
from protocol.rpc import Server
from protocol.tasks import together
from protocol.zmq_transport import ZmqTransport

Run = Coroutine[Any, Any, None]

log = logging.getLogger("dango.conductor")


async def serve(config: ConductorConfig) -> None:
    """Serve until cancelled; then refuse newcomers and let running requests end, up to `drain_s`.

    Raises Mismatch if the cluster that Redis knows is another, ValueError for a `listen` that nobody could reach.
    """
    if config.redis:
        require_reachable(config.listen)
    model = open_model(config)
    transport, metrics = ZmqTransport(), Metrics(model.manifest.model)
    try:
        port = transport.bind(config.listen)
        view, peers, directory = View(model.manifest, config.report_s), Peers(transport), DirectoryLink(transport)
        admission = Admission(view, metrics, config, random.Random())
        roster = Roster(port.address, expiry_s(config.report_s)) if config.redis else Roster()
        registry = Registry(view, peers, directory, metrics, admission.estimates, roster)
        dispatcher = Dispatcher(
            view, peers, directory, registry, metrics, admission, in_flight_max=config.in_flight_max
        )
        gateway = Gateway(dispatcher, model.tokenizer, model.manifest, metrics, config, random.SystemRandom())
        control = Server(port, registry.handlers())
        try:
            async with _shared(config.redis, port.address, view, registry, roster) as presence:
                expiry = registry.expire_forever(lambda: control.bad_frames)
                sharing = [presence.run()] if presence is not None else []
                runs = together([control.serve(), expiry, admission.run(), *sharing])
                await _run(gateway, dispatcher, config, runs)
        finally:
            await peers.aclose()
            await directory.aclose()
    finally:
        transport.close()


async def _run(gateway: Gateway, dispatcher: Dispatcher, config: ConductorConfig, runs: Run) -> None:
    loops = asyncio.create_task(runs)
    runner = gateway.runner()
    try:
        await _start_http(runner, config)
        await asyncio.wait([loops])  # for ever, unless they fail
        loops.result()
    finally:
        await dispatcher.drain(config.drain_s)  # while clients still find /ready, and instances their registry
        await runner.cleanup()
        loops.cancel()
        await asyncio.gather(loops, return_exceptions=True)


@asynccontextmanager
async def _shared(
    redis: str, address: str, view: View, registry: Registry, roster: Roster
) -> AsyncIterator[Presence | None]:
    """What shares the cluster with other Conductors; None without Redis. Raises Mismatch."""
    if not redis:
        yield None
        return
    presence = Presence(redis, address, view, registry, roster)
    try:
        await presence.open()
        yield presence
    finally:
        await presence.aclose()


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
