"""A whole cluster in one process: real services, real sockets, real shared memory; only the model is a fake."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from conductor.admission import Admission
from conductor.ask import Ask
from conductor.config import ConductorConfig
from conductor.dispatch import Dispatcher
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.registry import Registry
from conductor.view import View
from decode_pool.api import Tokens
from decode_pool.config import DecodeConfig
from decode_pool.service import DecodeService
from decode_pool.writeback import WriteBack
from engine.api import EndReason, Sampling
from kvcache_pool.announcing import announce, place_of
from kvcache_pool.api import DirectoryLink, Mover, Stats
from kvcache_pool.geometry import Geometry
from kvcache_pool.index import Index
from kvcache_pool.segment import Segment
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.service import DirectoryService
from kvcache_pool.slots import DEFAULT_SHARES, Shares
from kvcache_pool.transfer.mover import PoolMover, Reach
from prefill_pool.config import PrefillConfig
from prefill_pool.service import PrefillService
from protocol.ids import RequestId, SegmentId, token_ids
from protocol.instance import Role, Work, new_incarnation, run_instance
from protocol.registry import Heard, Load, Pool
from protocol.rpc import Server
from protocol.zmq_transport import ZmqTransport
from tests.fakes import LAYOUT, MANIFEST, FakeEngine

READY_S = 10.0
NUMBERS = itertools.count()


class Listener:
    """A conductor.ask.Reply that keeps what it hears. `enough` ends a choice as a stop string would."""

    def __init__(self, enough: int = 10**9) -> None:
        self.said: dict[int, list[int]] = {}
        self.ended: dict[int, EndReason] = {}
        self.reused: list[int] = []
        self.spoke = asyncio.Event()
        self._enough = enough

    def admitted(self) -> None:
        pass

    def prefilled(self, reused_tokens: int) -> None:
        self.reused.append(reused_tokens)

    async def tokens(self, choice: int, said: Tokens) -> bool:
        assert choice not in self.ended
        so_far = self.said.setdefault(choice, [])
        so_far.extend(said.tokens)
        self.spoke.set()
        return len(so_far) < self._enough

    async def end(self, choice: int, reason: EndReason) -> None:
        assert choice not in self.ended
        self.ended[choice] = reason


def an_ask(prompt: Sequence[int], tokens: int = 8, choices: int = 1, **more: object) -> Ask:
    samplings = [Sampling(seed=seed, max_tokens=tokens) for seed in range(choices)]
    return Ask(RequestId(f"r{next(NUMBERS)}"), token_ids(prompt), samplings, **more)  # type: ignore[arg-type]


@dataclass
class Cluster:
    """What a test can see and do."""

    transport: ZmqTransport
    view: View
    dispatcher: Dispatcher
    directory: DirectoryLink
    metrics: Metrics
    control: str
    reach: Reach
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    services: dict[str, PrefillService | DecodeService] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    movers: dict[str, Mover] = field(default_factory=dict)
    links: dict[str, DirectoryLink] = field(default_factory=dict)
    heard: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set once a decode instance knows the directory; until then it drops what it would write back."""

    async def serve(self, ask: Ask, reply: Listener | None = None) -> Listener:
        reply = reply or Listener()
        await self.dispatcher.serve(ask, reply)
        return reply

    def counted(self, name: str) -> float | None:
        """A counter of the Conductor's."""
        return self.metrics.registry.get_sample_value(name, {"model_name": "fake"})

    async def stats(self) -> Stats:
        return await self.directory.get().stats()

    async def cached(self, blocks: int) -> None:
        """Returns once so many blocks are cached: what decoding fills is written back a little later."""
        async with asyncio.timeout(READY_S):
            while (await self.stats()).cached < blocks:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.01)

    async def ready(self, alive: int) -> None:
        async with asyncio.timeout(READY_S):
            while sum(len(self.view.of(pool)) for pool in Pool) < alive:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.01)

    async def at_rest(self) -> Stats:
        """The stats once nothing is leased or reserved any more, and every engine's pages are free."""
        async with asyncio.timeout(READY_S):
            while True:
                stats = await self.stats()
                busy = [s for s in self.services.values() if s.load().blocks_free != s.load().blocks_total]
                if not busy and stats.leases == stats.reserved == stats.leased == 0:
                    break
                await asyncio.sleep(0.01)
        for service in self.services.values():
            service.check()
        self.view.check()
        assert all(i.idle for pool in Pool for i in self.view.of(pool))
        return stats

    async def kill(self, name: str) -> None:
        """End an instance without a word to anybody but the operating system."""
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks.pop(name), return_exceptions=True)

    def start_prefill(self, name: str, engine: FakeEngine | None = None, mover: Mover | None = None) -> None:
        engine = engine or FakeEngine()
        mover, directory = mover or self._mover(), DirectoryLink(self.transport)
        service = PrefillService(engine, mover, directory, PrefillConfig(block_tokens=4, chunk_tokens=8))

        async def heard(news: Heard) -> None:
            pass

        self._start(name, Pool.PREFILL, engine, service, mover, directory, heard, [])

    def start_decode(
        self, name: str, engine: FakeEngine | None = None, mover: Mover | None = None, steps_max: int = 1
    ) -> None:
        engine = engine or FakeEngine()
        mover, directory = mover or self._mover(), DirectoryLink(self.transport)
        back, known = WriteBack(mover, directory), self.heard.setdefault(name, asyncio.Event())
        service = DecodeService(engine, mover, back, MANIFEST, DecodeConfig(steps_max=steps_max))

        async def heard(news: Heard) -> None:
            back.near = None if news.home is None else SegmentId(news.home)
            await directory.follow(news.directory)
            if news.directory is not None:
                known.set()

        self._start(name, Pool.DECODE, engine, service, mover, directory, heard, [back.run])

    def _mover(self) -> Mover:
        return PoolMover(self.transport, "here", self.reach)

    def _start(self, name, pool, engine, service, mover, directory, heard, extra) -> None:  # type: ignore[no-untyped-def]
        loops = [lambda _, loop=loop: loop() for loop in (service.step_forever, *extra)]
        work = Work(service.handlers(), service.load, heard, loops)
        role = Role(pool, name, new_incarnation(), "here", MANIFEST)
        self.engines[name], self.services[name] = engine, service
        self.movers[name], self.links[name] = mover, directory

        async def live() -> None:
            try:
                await run_instance(self.transport, role, work, listen="tcp://127.0.0.1:0", conductor=self.control)
            finally:
                await mover.aclose()
                await directory.aclose()

        self.tasks[name] = asyncio.create_task(live())

    def start_kvcache(self, name: str, *, blocks: int, directory: bool, shares: Shares = DEFAULT_SHARES) -> None:
        geometry = Geometry.within(LAYOUT, blocks * 8192)
        geometry = replace(geometry, slots=min(geometry.slots, blocks))
        segment = Segment(SegmentId(name), new_incarnation(), geometry)
        service, index = SegmentService(segment), DirectoryService(Index(shares))
        elsewhere: list[str | None] = [None]

        async def heard(news: Heard) -> None:
            elsewhere[0] = news.directory

        async def tell(address: str) -> None:
            place = place_of(segment, address, "here")
            await announce(segment, place, self.transport, lambda: address if directory else elsewhere[0])

        async def sweep(_: str) -> None:
            await index.sweep()

        handlers = service.handlers() | (index.handlers() if directory else {})
        work = Work(handlers, index.load if directory else Load, heard, [tell, sweep])
        role = Role(Pool.KVCACHE, name, segment.incarnation, "here", MANIFEST, directory)

        async def live() -> None:
            try:
                await run_instance(self.transport, role, work, listen="tcp://127.0.0.1:0", conductor=self.control)
            finally:
                service.close()
                segment.close()

        self.tasks[name] = asyncio.create_task(live())


@asynccontextmanager
async def a_cluster(
    prefills: int = 1,
    decodes: int = 1,
    segments: int = 1,
    *,
    blocks: int = 256,
    layer_s: float = 0.0,
    reach: Reach = Reach.AUTO,
    in_flight_max: int = 64,
    config: ConductorConfig | None = None,
    steps_max: int = 1,
    shares: Shares = DEFAULT_SHARES,
) -> AsyncIterator[Cluster]:
    """Ready to serve; afterwards everything has ended."""
    transport, metrics, view = ZmqTransport(), Metrics("fake"), View(MANIFEST)
    peers, directory = Peers(transport), DirectoryLink(transport)
    config = config or ConductorConfig(block_tokens=LAYOUT.block_tokens)
    admission = Admission(view, metrics, config, random.Random(1))
    registry = Registry(view, peers, directory, metrics, admission.estimates)
    server = Server(transport.bind("tcp://127.0.0.1:0"), registry.handlers())
    dispatcher = Dispatcher(view, peers, directory, registry, metrics, admission, in_flight_max=in_flight_max)
    cluster = Cluster(transport, view, dispatcher, directory, metrics, server.address, reach)
    expire = registry.expire_forever(lambda: server.bad_frames)
    loops = [asyncio.create_task(loop) for loop in (server.serve(), expire, admission.run())]
    try:
        for n in range(segments):
            cluster.start_kvcache(f"kvcache-{n}", blocks=blocks, directory=n == 0, shares=shares)
        for n in range(prefills):
            cluster.start_prefill(f"prefill-{n}", FakeEngine(layer_s=layer_s))
        for n in range(decodes):
            cluster.start_decode(f"decode-{n}", FakeEngine(layer_s=layer_s), steps_max=steps_max)
        await cluster.ready(prefills + decodes + segments)
        yield cluster
    finally:
        for name in list(cluster.tasks):
            await cluster.kill(name)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await peers.aclose()
        await directory.aclose()
        transport.close()
