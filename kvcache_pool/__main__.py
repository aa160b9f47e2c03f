"""`dango kvcache`: one KVCache instance, built from real parts. `dango kvcache VERB` asks a pool that runs."""

import asyncio
import itertools
import logging
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvcache_pool import operate
from kvcache_pool.announcing import announce, place_of
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.evacuation import Evacuation
from kvcache_pool.events import Events
from kvcache_pool.geometry import Geometry
from kvcache_pool.index import Index
from kvcache_pool.publisher import Publisher
from kvcache_pool.segment import Segment, ownerless, reclaim
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.service import DirectoryService
from kvcache_pool.slots import Shares
from kvcache_pool.tiers import DiskTier, beside, disk_segment
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from kvcache_pool.transfer.mover import PoolMover
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest
from protocol.errors import DeadlineExceeded, PeerLost
from protocol.ids import Incarnation, SegmentId
from protocol.instance import Role, Work, addresses_in, new_incarnation, run_instance
from protocol.membership import REGISTRY_S
from protocol.process import run_service
from protocol.registry import REPORT_EVERY_S, GetManifest, Heard, Load, Pool
from protocol.rpc import Client
from protocol.tasks import together
from protocol.transport import Transport
from protocol.zmq_transport import ZmqTransport

MANIFEST_S = 120.0
"""How long to wait for the Conductor, which may have a large model to read before it answers."""

RECLAIM_AFTER_S = 30.0
"""How long the memory of others who were killed waits for their next life, unless room is wanted at once."""

log = logging.getLogger("dango.kvcache")


async def serve(config: KVCacheConfig) -> None:
    """Own the network and the memory, and serve until cancelled."""
    transport = ZmqTransport()
    try:
        manifest = await _manifest(transport, config.conductor)
        geometry = Geometry.within(manifest.layout, config.size_bytes)
        with ExitStack() as stack:
            segment = Segment(SegmentId(config.instance), new_incarnation(), geometry)
            stack.callback(segment.close)
            _tested(segment)
            disk = _disk(config, manifest.layout, segment.incarnation)
            if disk is not None:
                stack.callback(disk.close)
                _tested(disk)
            await _serve(transport, config, manifest, segment, disk)
    finally:
        transport.close()


def _disk(config: KVCacheConfig, layout: BlockLayout, incarnation: Incarnation) -> Segment | None:
    """The disk tier, if there is to be one. Raises OSError."""
    if not config.disk_path:
        return None
    folder = Path(config.disk_path)
    folder.mkdir(parents=True, exist_ok=True)
    geometry = Geometry.within(layout, config.disk_bytes)
    return Segment(disk_segment(SegmentId(config.instance)), incarnation, geometry, folder, keep=True)


def _tested(segment: Segment) -> None:
    """What holds nothing is tested; what holds something is verified at each read."""
    if not segment.adopted:
        segment.memory.self_test()
    said = "room for %d blocks, %d MiB%s"
    whence = ", taken over from an earlier life" if segment.adopted else ""
    geometry = segment.memory.geometry
    log.info(said, geometry.slots, geometry.file_bytes >> 20, whence, extra={"path": segment.path})


async def _serve(
    transport: Transport, config: KVCacheConfig, manifest: Manifest, segment: Segment, disk: Segment | None
) -> None:
    host = config.host or socket.gethostname()
    mooncake = MooncakeSettings(config.mooncake_protocol, config.mooncake_devices)
    bytes_service = SegmentService(segment, config.listen, mooncake if config.transport == "mooncake" else None)
    disk_tier = DiskTier(segment, disk, config.listen) if disk is not None else None
    directory: DirectoryService | None = None
    publisher: Publisher | None = None
    if config.directory:
        publisher = _publisher(config, manifest, segment.incarnation)
        directory = DirectoryService(_index(config, publisher), publisher)
    elsewhere: str | None = None  # the directory's address, where it is not here

    async def heard(news: Heard) -> None:
        nonlocal elsewhere
        elsewhere = news.directory

    async def tell(address: str) -> None:
        place = place_of(segment, address, host)
        await announce(segment, place, transport, lambda: address if directory is not None else elsewhere)

    async def save(address: str) -> None:
        if disk_tier is not None:
            await disk_tier.run(
                transport, host, beside(address), lambda: address if directory is not None else elsewhere
            )

    mover = PoolMover(transport, host)
    evacuations = [Evacuation(one, mover) for one in (segment, disk) if one is not None]

    async def evacuate(address: str) -> None:
        await together(
            [one.run(transport, lambda: address if directory is not None else elsewhere) for one in evacuations]
        )

    def load() -> Load:
        of_pool = directory.load() if directory is not None else Load()
        return replace(of_pool, draining=segment.draining)

    async def sweep(_: str) -> None:
        if directory is not None:
            await directory.sweep()

    async def replay(_: str) -> None:
        if publisher is not None:
            await publisher.serve()

    async def tidy(_: str) -> None:
        left = ownerless()  # who dies later may be about to come back
        await asyncio.sleep(RECLAIM_AFTER_S)
        for path in reclaim(only=left):
            log.warning("removed %s, whose owner is dead and has not come back", path)

    handlers = bytes_service.handlers() | (directory.handlers() if directory is not None else {})
    loops = (tell, save, evacuate, sweep, replay, tidy)
    work = Work(handlers, load, heard, loops)
    role = Role(Pool.KVCACHE, config.instance, segment.incarnation, host, manifest, config.directory)
    try:
        await run_instance(transport, role, work, listen=config.listen, conductor=config.conductor)
    finally:
        await mover.aclose()
        bytes_service.close()
        if disk_tier is not None:
            disk_tier.close()
        if publisher is not None:
            publisher.close()


def _publisher(config: KVCacheConfig, manifest: Manifest, incarnation: Incarnation) -> Publisher | None:
    """None where nobody shall hear of events. Raises OSError."""
    if not config.events:
        return None
    events = Events(incarnation, manifest.layout.block_tokens, config.events_form)
    topic = config.events_topic or f"kv@{config.instance}@{manifest.model}"
    publisher = Publisher(events, topic, config.events, config.events_replay)
    where = publisher.address, publisher.replay_address or "nowhere"
    log.info("KV events under %s at %s, again at %s", topic, *where)
    return publisher


def _index(config: KVCacheConfig, publisher: Publisher | None) -> Index:
    shares = Shares(
        config.copies_share,
        config.hard_pins_share,
        config.eviction,
        config.watermark,
        config.watermark_step,
        config.tenant_share,
    )
    recorder = publisher.events if publisher is not None else None
    return Index(shares, generation=time.time_ns(), recorder=recorder)


async def _manifest(transport: Transport, conductor: str) -> Manifest:
    """Ask until a Conductor answers. Raises PeerLost or DeadlineExceeded when none has in MANIFEST_S."""
    loop = asyncio.get_running_loop()
    end = loop.time() + MANIFEST_S
    for address in itertools.cycle(addresses_in(conductor)):
        async with Client(transport, address) as client:
            try:
                within_s = min(REGISTRY_S, end - loop.time())
                return await client.call(GetManifest(), Manifest, within_s=within_s)
            except (PeerLost, DeadlineExceeded):
                if loop.time() + REPORT_EVERY_S > end:
                    raise
            await asyncio.sleep(REPORT_EVERY_S)
    raise AssertionError("a cycle has no end")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        return operate.main(arguments)
    verbs = "|".join(operate.VERBS)
    teaches = f"One KVCache instance: memory for KV blocks. `dango kvcache {verbs}` ask a pool that runs."
    return run_service("kvcache", KVCacheConfig, serve, teaches=teaches, argv=arguments)


if __name__ == "__main__":
    sys.exit(main())
