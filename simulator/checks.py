"""What is true of every run, whatever goes wrong. Each function asserts; none changes anything.

always      the books of every service agree with themselves, and what is cached is what its name says
each end    a request ends in exactly one way, and no token of its answer is wrong, missing or said twice
at rest     when faults have stopped: nobody holds anything for anybody, and the view is the world
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from conductor.admission import Admission
from conductor.view import View
from decode_pool.api import Tokens
from decode_pool.service import DecodeService
from engine.api import EndReason
from kvcache_pool.index import Index
from prefill_pool.service import PrefillService
from protocol.blocks import block_hashes
from protocol.ids import BlockHash, Ids
from protocol.registry import Pool
from simulator.engine import foreseen
from simulator.faults import Client
from simulator.mover import Memory
from simulator.world import Member, World


class Ending(Enum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    LEFT = "left"
    """Its client did."""
    DIED = "died"
    """Its Conductor did, or was away."""


@dataclass
class Told:
    """What one client heard. A conductor.ask.Reply."""

    client: Client
    said: list[list[int]] = field(default_factory=list)
    ends: list[list[EndReason]] = field(default_factory=list)
    admitted_times: int = 0
    prefilled_times: int = 0
    ending: Ending | None = None
    reason: str = ""
    """Of a refusal or failure."""

    def __post_init__(self) -> None:
        self.said = [[] for _ in self.client.samplings]
        self.ends = [[] for _ in self.client.samplings]

    def admitted(self) -> None:
        """See Reply."""
        self.admitted_times += 1

    def prefilled(self, reused_tokens: int) -> None:
        """See Reply."""
        self.prefilled_times += 1

    async def tokens(self, choice: int, said: Tokens) -> bool:
        """See Reply."""
        assert said.tokens, "a message without a token"
        assert self.ending is None, "a token after the end of the request"
        assert not self.ends[choice], "a token after the end of its choice"
        assert not self.stopped(choice), "a token after the client's stop"
        for token in said.tokens:
            self.said[choice].append(token)
            if self.stopped(choice):
                return False
        return True

    async def end(self, choice: int, reason: EndReason) -> None:
        """See Reply."""
        self.ends[choice].append(reason)

    def stopped(self, choice: int) -> bool:
        """Whether the client has found its stop string."""
        return len(self.said[choice]) == self.client.stops_after

    def check(self) -> None:
        """Asserts that this request ended once, and what was said is right."""
        assert self.ending is not None, "it never ended"
        assert self.admitted_times <= 1, f"admitted {self.admitted_times} times"
        assert self.prefilled_times <= 1, f"prefilled {self.prefilled_times} times"
        for choice, (said, whole) in enumerate(zip(self.said, self.client.expected, strict=True)):
            assert said == whole[: len(said)], f"choice {choice} said {said}, not {whole}"
            ends = len(self.ends[choice])
            assert ends + self.stopped(choice) <= 1, f"choice {choice} ended {ends} times"
            if ends:
                assert said == whole, f"choice {choice} ended with {len(said)} of {len(whole)} tokens"
            if self.ending is Ending.FINISHED:
                assert ends or self.stopped(choice), f"finished, but choice {choice} has no end"
        if self.ending is Ending.REFUSED:
            assert not any(self.said), "refused after the first token"


def check_always(world: World, right: Mapping[BlockHash, bytes]) -> None:
    """At any moment. `right` is what `kv_of` gives."""
    world.index.check()
    world.view.check()
    world.admission.check()
    for member in world.members.values():
        if isinstance(member.service, PrefillService | DecodeService):
            member.service.check()
    check_kv(world.index, world.memory, right)


def kv_of(world: World, texts: Iterable[Ids]) -> dict[BlockHash, bytes]:
    """For the name of every full block of these texts, what it holds: the fingerprints of its layers."""
    root, layout = world.manifest.root(), world.layout
    right: dict[BlockHash, bytes] = {}
    for text in texts:
        names = block_hashes(root, text)
        right |= zip(names, map(b"".join, foreseen(text, layout.block_tokens, layout.layers)), strict=True)
    return right


def check_kv(index: Index, memory: Memory, right: Mapping[BlockHash, bytes]) -> None:
    """Asserts that what the index names lies where it says, as its name says."""
    for name, place, grant in index.named():
        segment = memory.reach(place.segment)
        if segment is None or segment.incarnation != place.incarnation:
            continue  # it died, and the index will hear of it
        written = {generations[grant.slot] for generations in segment.generations}
        if max(written) > grant.generation:
            continue  # a late writer under a lease of an earlier directory: readers will find another generation
        assert written == {grant.generation}, f"{grant} was never written whole"
        held = array("q", [prints[grant.slot] for prints in segment.prints]).tobytes()
        assert held == right[name], f"{grant} holds what its name does not say"


def check_rest(world: World) -> None:
    """When nothing is asked any more and nothing goes wrong."""
    _check_view(world.view, world.members)
    living = {instance.incarnation for pool in Pool for instance in world.view.of(pool)}
    kept = set(world.peers.known) - living
    assert not kept, f"the Conductor keeps connections to the dead: {kept}"
    _check_index(world.index, world.plan.prefills)
    _check_line(world.admission)
    for member in world.members.values():
        assert not member.task.done(), f"{member.name} has ended by itself: {member.task}"
        if isinstance(member.service, PrefillService | DecodeService):
            _check_idle(member.name, member.service)


def _check_view(view: View, members: Mapping[str, Member]) -> None:
    view.check()
    instances = [instance for pool in Pool for instance in view.of(pool)]
    believed, alive = sorted(instance.name for instance in instances), sorted(members.keys() - {"conductor"})
    assert believed == alive, f"the view has {believed}, alive are {alive}"
    assert not view.sending, f"bytes on their way for ever: {view.sending}"
    loaded = [instance.name for instance in instances if not instance.idle]
    assert not loaded, f"the ledger still has something for {loaded}"


def _check_index(index: Index, segments: int) -> None:
    index.check()
    stats = index.stats()
    assert len(index.segments()) == segments, f"the directory knows {index.segments()}"
    assert (stats.leases, stats.leased, stats.reserved) == (0, 0, 0), f"blocks are held by nobody: {stats}"


def _check_line(admission: Admission) -> None:
    admission.check()
    assert admission.held == 0, "somebody is held for ever"


def _check_idle(name: str, service: PrefillService | DecodeService) -> None:
    service.check()
    load = service.load()
    assert (load.running, load.waiting) == (0, 0), f"{name} still works: {load}"
    assert load.blocks_free == load.blocks_total, f"{name} has lost pages: {load}"
