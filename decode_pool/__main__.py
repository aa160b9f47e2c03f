"""`dango decode`: one decode instance, built from real parts."""

import socket
import sys
from collections.abc import Sequence

from decode_pool.config import DecodeConfig
from decode_pool.service import DecodeService
from decode_pool.writeback import WriteBack
from engine.calibrate import calibrate, decode_trials, rest_trials
from engine.hosting import host_engine, kind_of
from engine.manifest import open_model
from engine.pace import Pace
from kvcache_pool.api import DirectoryLink
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from kvcache_pool.transfer.mover import Reach
from kvcache_pool.transfer.packed import mover_to
from protocol.ids import SegmentId
from protocol.instance import Role, Work, new_incarnation, run_instance
from protocol.process import run_service
from protocol.registry import Heard, Pool
from protocol.zmq_transport import ZmqTransport


async def serve(config: DecodeConfig) -> None:
    """Load the model, then serve until cancelled."""
    reach, mooncake = Reach(config.transport), MooncakeSettings(config.mooncake_protocol, config.mooncake_devices)
    if reach is Reach.MOONCAKE:
        mooncake.require()  # before the long load
    model = open_model(config)
    host = config.host or socket.gethostname()
    engine, pace = await host_engine(model, config), Pace()
    trials = [*decode_trials(engine, config.batch_max), *rest_trials(engine, config.chunk_tokens)]
    await calibrate(engine, trials, pace, config.calibrate_s)
    transport = ZmqTransport()
    mover = mover_to(transport, host, reach, model.manifest.layout, mooncake)
    directory = DirectoryLink(transport)
    writeback = WriteBack(mover, directory)
    service = DecodeService(engine, mover, writeback, model.manifest, config, pace)

    async def heard(news: Heard) -> None:
        writeback.near = None if news.home is None else SegmentId(news.home)
        await directory.follow(news.directory)

    async def step(_: str) -> None:
        await service.step_forever()

    async def write_back(_: str) -> None:
        await writeback.run()

    role = Role(Pool.DECODE, config.instance, new_incarnation(), host, model.manifest, kind=kind_of(config))
    work = Work(service.handlers(), service.load, heard, [step, write_back])
    try:
        await run_instance(transport, role, work, listen=config.listen, conductor=config.conductor)
    finally:
        await mover.aclose()
        await directory.aclose()
        transport.close()
        engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    teaches = "One decode instance: loads KV from the pool into its running batch and streams tokens."
    return run_service("decode", DecodeConfig, serve, teaches=teaches, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
