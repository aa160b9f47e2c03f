"""`dango prefill`: one prefill instance, built from real parts."""

import socket
import sys
from collections.abc import Sequence

from engine.calibrate import calibrate, prefill_trials
from engine.hosting import host_engine, kind_of
from engine.manifest import open_model
from engine.pace import Pace
from kvcache_pool.api import DirectoryLink
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from kvcache_pool.transfer.mover import Reach
from kvcache_pool.transfer.packed import mover_to
from prefill_pool.config import PrefillConfig
from prefill_pool.service import PrefillService
from protocol.instance import Role, Work, new_incarnation, run_instance
from protocol.process import run_service
from protocol.registry import Heard, Pool
from protocol.zmq_transport import ZmqTransport


async def serve(config: PrefillConfig) -> None:
    """Load the model, then serve until cancelled."""
    reach, mooncake = Reach(config.transport), MooncakeSettings(config.mooncake_protocol, config.mooncake_devices)
    if reach is Reach.MOONCAKE:
        mooncake.require()  # before the long load
    model = open_model(config)
    host = config.host or socket.gethostname()
    engine, pace = await host_engine(model, config), Pace()
    await calibrate(engine, prefill_trials(engine, config.chunk_tokens), pace, config.calibrate_s)
    transport = ZmqTransport()
    mover = mover_to(transport, host, reach, model.manifest.layout, mooncake)
    directory = DirectoryLink(transport)
    service = PrefillService(engine, mover, directory, config, pace)

    async def heard(news: Heard) -> None:
        """Nothing to learn: each request says where its directory is."""

    async def step(_: str) -> None:
        await service.step_forever()

    role = Role(Pool.PREFILL, config.instance, new_incarnation(), host, model.manifest, kind=kind_of(config))
    work = Work(service.handlers(), service.load, heard, [step])
    try:
        await run_instance(transport, role, work, listen=config.listen, conductor=config.conductor)
    finally:
        await mover.aclose()
        await directory.aclose()
        transport.close()
        engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    teaches = "One prefill instance: computes the KV cache of prompts and stores it, layer by layer, in the pool."
    return run_service("prefill", PrefillConfig, serve, teaches=teaches, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
