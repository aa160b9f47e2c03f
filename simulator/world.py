"""A whole cluster on virtual time: the real services over a network in memory, with engines that only cost time.

    Conductor ── control port                     every process is a Site of the network
    prefill-0 on host p0, with segment kvcache-0 (and the directory)
    prefill-1 on host p1, with segment kvcache-1
    decode-0  on host d0, ...

No rule of scheduling is here: what the world tells is what production does.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conductor.admission import Admission
from conductor.ask import Ask, Reply
from conductor.config import ConductorConfig
from conductor.dispatch import Dispatcher
from conductor.metrics import Metrics
from conductor.peers import Peers
from conductor.registry import Registry
from conductor.view import View
from decode_pool.config import DecodeConfig
from decode_pool.service import DecodeService
from decode_pool.writeback import WriteBack
from engine.calibrate import calibrate, decode_trials, prefill_trials, rest_trials
from engine.pace import Pace
from kvcache_pool.announcing import announce
from kvcache_pool.api import DirectoryLink, Place
from kvcache_pool.index import Index
from kvcache_pool.service import DirectoryService
from prefill_pool.config import PrefillConfig
from prefill_pool.service import PrefillService
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest
from protocol.ids import Incarnation, InstanceId, SegmentId
from protocol.instance import Role, Work, run_instance
from protocol.registry import DEAD_AFTER_REPORTS, Heard, Load, Pool
from protocol.rpc import Server
from protocol.tasks import together
from simulator.cores import Cores
from simulator.cost import CostModel
from simulator.engine import CostEngine
from simulator.mover import Memory, SimMover, SimSegment, Wire
from simulator.network import Network, Site, Weather

CONTROL = "sim://conductor:1"
READY_S = 30.0
"""Virtual seconds within which every instance must have registered."""

CALIBRATE_S = 10.0
"""Virtual seconds that an instance may try passes before it registers, as real ones do."""

LAYERS = 4
"""Layers of the simulated layout: each stands for a quarter of the model's. Loads and stores overlap with
computing at this grain, and an event for each of 80 layers would only cost time."""


@dataclass(frozen=True)
class Plan:
    """What to build."""

    cost: CostModel
    prefills: int
    decodes: int
    conductor: ConductorConfig
    prefill: PrefillConfig
    decode: DecodeConfig
    segment_blocks: int
    """Of each prefill instance's host."""
    prefill_pages: int
    decode_pages: int
    context_tokens: int
    seed: int = 0
    size_blind: bool = False
    """Whether admission judges each prompt as if it were of mean length."""
    exact: bool = False
    weather: Weather = field(default_factory=Weather)


@dataclass
class Member:
    """One simulated process."""

    name: str
    site: Site
    task: asyncio.Task[None]
    service: PrefillService | DecodeService | DirectoryService | None = None
    engine: CostEngine | None = None
    segment: SimSegment | None = None
    requests: set[asyncio.Task[None]] = field(default_factory=set)
    """Of a Conductor: those under way there, which end with it."""


class World:
    """Build it on a virtual loop, `start`, use `dispatcher` or `serve`, `close`. The Conductor's parts (`view`,
    `dispatcher`, `admission`, ...) are those of its present life."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network = Network(plan.weather, random.Random(f"network {plan.seed}"))
        self.layout = layout_of(plan.cost, plan.conductor.block_tokens)
        self.manifest = Manifest("simulated", "cost", "none", plan.context_tokens, self.layout)
        self.memory = Memory(self.layout.run_bytes)
        self.members: dict[str, Member] = {}
        self.index = Index()
        self._lives = itertools.count(1)
        self._buses: dict[str, Wire] = {}
        self._cores = Cores(plan.cost.speeds)
        self._build_conductor()

    def _build_conductor(self) -> None:
        config, self._site = self.plan.conductor, self.network.site("conductor")
        self.metrics = Metrics("simulated")
        self.view = View(self.manifest, config.report_s)
        self.peers, self.directory = Peers(self._site), DirectoryLink(self._site)
        self.admission: Admission = Admission(
            self.view, self.metrics, config, random.Random(f"placement {self.plan.seed}")
        )
        rules = replace(self.admission.gate.rules, size_blind=self.plan.size_blind)
        self.admission.gate.rules = rules
        registry = Registry(self.view, self.peers, self.directory, self.metrics, self.admission.estimates)
        self.dispatcher = Dispatcher(
            self.view,
            self.peers,
            self.directory,
            registry,
            self.metrics,
            self.admission,
            in_flight_max=config.in_flight_max,
        )
        server = Server(self._site.bind(CONTROL), registry.handlers())
        loops = [server.serve(), registry.expire_forever(lambda: server.bad_frames), self.admission.run()]
        self._conductor = _conduct(loops, [self.peers, self.directory])

    async def start(self) -> None:
        """Start everything; returns when every instance has registered. Raises TimeoutError."""
        self._start_conductor()
        for number in range(self.plan.prefills):
            self.start_kvcache(number)
            self.start_prefill(number)
        for number in range(self.plan.decodes):
            self.start_decode(number)
        everyone = 2 * self.plan.prefills + self.plan.decodes
        async with asyncio.timeout(READY_S):
            while sum(len(self.view.of(pool)) for pool in Pool) < everyone:  # noqa: ASYNC110 - time is free here
                await asyncio.sleep(0.1)
        await asyncio.sleep(
            2.0 + 2 * self.plan.conductor.report_s
        )  # segments announce themselves, decode instances hear of the directory

    async def close(self) -> None:
        """End everything."""
        for name in list(self.members):
            await self.kill(name)

    async def kill(self, name: str) -> None:
        """A process dies without a word."""
        member = self.members.pop(name)
        member.site.die()
        if member.segment is not None:
            member.segment.alive = False
        tasks = [member.task, *member.requests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def revive(self, name: str) -> None:
        """Start a process anew that was killed; it remembers nothing."""
        assert name not in self.members, f"{name} is alive"
        if name == "conductor":
            self._build_conductor()
            self._start_conductor()
            return
        pool, _, number = name.partition("-")
        starts = {"prefill": self.start_prefill, "decode": self.start_decode, "kvcache": self.start_kvcache}
        starts[pool](int(number))

    def serve(self, ask: Ask, reply: Reply) -> asyncio.Task[None]:
        """A request to the Conductor that lives now; when it is killed, the request is cancelled."""
        requests = self.members["conductor"].requests
        task = asyncio.create_task(self.dispatcher.serve(ask, reply))
        requests.add(task)
        task.add_done_callback(requests.discard)
        return task

    def _start_conductor(self) -> None:
        task = asyncio.create_task(self._conductor)
        self.members["conductor"] = Member("conductor", self._site, task)

    def start_prefill(self, number: int) -> None:
        """Start `prefill-<number>` on host p<number>."""
        name, host = f"prefill-{number}", f"p{number}"
        site, engine = self.network.site(name), self._engine(self.plan.prefill_pages)
        mover, directory = SimMover(self.memory, host, self._bus(host)), DirectoryLink(site)
        config, pace = self.plan.prefill, Pace()
        service = PrefillService(engine, mover, directory, config, pace)

        async def first() -> None:
            await calibrate(engine, prefill_trials(engine, config.chunk_tokens), pace, CALIBRATE_S)

        async def heard(news: Heard) -> None:
            """Each request says where its directory is."""

        work = Work(service.handlers(), service.load, heard, [lambda _: service.step_forever()])
        task = self._live(site, self._role(Pool.PREFILL, name, host), work, [directory], first)
        self.members[name] = Member(name, site, task, service, engine)

    def start_decode(self, number: int) -> None:
        """Start `decode-<number>` on host d<number>."""
        name, host = f"decode-{number}", f"d{number}"
        site, engine = self.network.site(name), self._engine(self.plan.decode_pages)
        mover, directory = SimMover(self.memory, host, self._bus(host)), DirectoryLink(site)
        back = WriteBack(mover, directory)
        config, pace = self.plan.decode, Pace()
        service = DecodeService(engine, mover, back, self.manifest, config, pace)

        async def first() -> None:
            trials = [*decode_trials(engine, config.batch_max), *rest_trials(engine, config.chunk_tokens)]
            await calibrate(engine, trials, pace, CALIBRATE_S)

        async def heard(news: Heard) -> None:
            back.near = None if news.home is None else SegmentId(news.home)
            await directory.follow(news.directory)

        work = Work(
            service.handlers(), service.load, heard, [lambda _: service.step_forever(), lambda _: back.run()]
        )
        task = self._live(site, self._role(Pool.DECODE, name, host), work, [directory], first)
        self.members[name] = Member(name, site, task, service, engine)

    def start_kvcache(self, number: int) -> None:
        """Start `kvcache-<number>` on host p<number>; number 0 keeps the directory, with an empty index."""
        name, host, keeps = f"kvcache-{number}", f"p{number}", number == 0
        site = self.network.site(name)
        out = Wire(self.plan.cost.network_bytes_s)
        segment = SimSegment(SegmentId(name), self._life(), self.plan.segment_blocks, LAYERS, out, host)
        self.memory.segments[segment.segment] = segment
        elsewhere: list[str | None] = [None]
        service: DirectoryService | None = None
        if keeps:
            self.index = Index(silent_s=DEAD_AFTER_REPORTS * self.plan.conductor.report_s)
            service = DirectoryService(self.index)

        async def heard(news: Heard) -> None:
            elsewhere[0] = news.directory

        async def tell(address: str) -> None:
            place = Place(segment.segment, segment.incarnation, address, host, "", segment.slots, self.layout)
            every_s = self.plan.conductor.report_s
            await announce(segment, place, site, lambda: address if keeps else elsewhere[0], every_s)

        loops: list[Callable[[str], Coroutine[Any, Any, None]]] = [tell]
        if service is not None:
            keeper = service
            loops.append(lambda _: keeper.sweep())
        load = service.load if service is not None else Load
        work = Work(service.handlers() if service is not None else {}, load, heard, loops)
        role = self._role(Pool.KVCACHE, name, host, segment.incarnation, directory=keeps)
        self.members[name] = Member(name, site, self._live(site, role, work, []), service, segment=segment)

    def _live(
        self,
        site: Site,
        role: Role,
        work: Work,
        links: Sequence[DirectoryLink],
        first: Callable[[], Awaitable[None]] | None = None,
    ) -> asyncio.Task[None]:
        async def live() -> None:
            try:
                if first is not None:
                    await first()
                await run_instance(site, role, work, listen=f"sim://{role.instance}:0", conductor=CONTROL)
            finally:
                for link in links:
                    await link.aclose()

        return asyncio.create_task(live())

    def _role(
        self, pool: Pool, name: str, host: str, life: Incarnation | None = None, *, directory: bool = False
    ) -> Role:
        return Role(
            pool, InstanceId(name), life or self._life(), host, self.manifest, directory, self.plan.cost.name
        )

    def _life(self) -> Incarnation:
        return Incarnation(f"life-{next(self._lives)}")

    def _engine(self, pages: int) -> CostEngine:
        plan = self.plan
        return CostEngine(plan.cost, self.layout, pages, plan.context_tokens, exact=plan.exact, cores=self._cores)

    def _bus(self, host: str) -> Wire:
        return self._buses.setdefault(host, Wire(self.plan.cost.host_bytes_s))


async def _conduct(loops: list[Coroutine[Any, Any, None]], links: Sequence[Peers | DirectoryLink]) -> None:
    try:
        await together(loops)
    finally:
        for link in links:
            await link.aclose()


def layout_of(cost: CostModel, block_tokens: int) -> BlockLayout:
    """LAYERS layers whose blocks have as many bytes as the model's: 2 bytes an element, keys and values."""
    dim = cost.kv_bytes_token // (LAYERS * 2 * 2)
    return BlockLayout(LAYERS, 1, dim, block_tokens, "bfloat16")
