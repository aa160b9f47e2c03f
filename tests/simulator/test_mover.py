"""Bytes take as long as their wire needs, and what is read is what was written under the same generation."""

import asyncio

import numpy as np
import pytest

from kvcache_pool.api import Grant, Priority, Stale
from protocol.errors import PeerLost
from protocol.ids import Incarnation, SegmentId
from simulator.loop import run_virtual
from simulator.mover import PRINT_BYTES, Memory, SimMover, SimSegment, Wire

LAYERS = 2
RUN_BYTES = 1000
NEAR, FAR = SegmentId("near"), SegmentId("far")
HOST_S, NETWORK_S = RUN_BYTES / 1e6, RUN_BYTES / 1e5


def a_memory() -> Memory:
    memory = Memory(RUN_BYTES)
    for segment, host in ((NEAR, "here"), (FAR, "there")):
        life = Incarnation(f"{segment} 1")
        memory.segments[segment] = SimSegment(segment, life, 8, LAYERS, Wire(1e5), host)
    return memory


def a_mover(memory: Memory) -> SimMover:
    return SimMover(memory, "here", Wire(1e6))


def grants(segment: SegmentId, *slots: int, generation: int = 7) -> list[Grant]:
    return [Grant(segment, slot, generation) for slot in slots]


def pages(count: int = 8) -> np.ndarray:
    return np.arange(count * PRINT_BYTES, dtype=np.uint8).reshape(count, PRINT_BYTES)


async def write_all(mover: SimMover, where: list[Grant]) -> None:
    for layer in range(LAYERS):
        await mover.write(layer, where, pages() + layer, range(len(where)), Priority.STORE)


async def read(mover: SimMover, layer: int, where: list[Grant]) -> tuple[int, np.ndarray]:
    out = np.zeros_like(pages())
    return await mover.read(layer, where, out, range(len(where)), Priority.LOAD), out


def test_what_is_read_is_what_was_written_across_segments() -> None:
    async def main() -> None:
        mover = a_mover(a_memory())
        where = grants(NEAR, 3, 1) + grants(FAR, 5)
        await write_all(mover, where)
        for layer in range(LAYERS):
            good, out = await read(mover, layer, where)
            assert good == 3
            assert np.array_equal(out[:3], pages()[:3] + layer)
        (near,), (far,) = grants(NEAR, 4, generation=9), grants(FAR, 2, generation=9)
        block = np.stack([pages()[4], pages()[5]])
        await mover.write_blocks([near, far], [block, block + 1], Priority.WRITE_BACK)
        assert np.array_equal((await read(mover, 1, [near]))[1][0], block[1])
        assert np.array_equal((await read(mover, 0, [far]))[1][0], block[0] + 1)

    run_virtual(main())


def test_a_read_takes_the_senders_wire_and_a_write_the_hosts_own() -> None:
    async def main() -> None:
        clock, mover = asyncio.get_running_loop().time, a_mover(a_memory())
        await mover.write(0, grants(NEAR, 1, 2), pages(), [0, 1], Priority.STORE)
        await mover.write(0, grants(FAR, 1, 2), pages(), [0, 1], Priority.STORE)
        assert clock() == pytest.approx(4 * HOST_S)
        began = clock()
        await read(mover, 0, grants(NEAR, 1, 2))
        assert clock() - began == pytest.approx(2 * HOST_S)
        began = clock()
        await asyncio.gather(read(mover, 0, grants(FAR, 1, 2)), read(mover, 0, grants(FAR, 1)))
        assert clock() - began == pytest.approx(3 * NETWORK_S), "one after the other"

    run_virtual(main())


def test_a_reader_is_told_how_far_it_can_trust_what_it_read() -> None:
    async def main() -> None:
        memory = a_memory()
        mover, where = a_mover(memory), grants(NEAR, 1, 2, 3)
        await write_all(mover, where)
        await write_all(mover, grants(NEAR, 2, generation=8))
        good, out = await read(mover, 0, where)
        assert (good, memory.corrupted) == (1, 1)
        assert not out[1:].any(), "nothing of what is bad"
        assert (await read(mover, 0, grants(NEAR, 6)))[0] == 0, "never written"

    run_virtual(main())


def test_a_late_writer_is_refused() -> None:
    async def main() -> None:
        mover = a_mover(a_memory())
        await write_all(mover, grants(NEAR, 1, generation=8))
        with pytest.raises(Stale):
            await mover.write(0, grants(NEAR, 1), pages() + 9, [0], Priority.STORE)
        good, out = await read(mover, 0, grants(NEAR, 1, generation=8))
        assert good == 1
        assert np.array_equal(out[0], pages()[0])

    run_virtual(main())


def test_a_segment_that_dies_while_bytes_are_under_way_gives_nothing_and_takes_nothing() -> None:
    async def main() -> None:
        memory = a_memory()
        mover, where = a_mover(memory), grants(NEAR, 1) + grants(FAR, 1)
        await write_all(mover, where)
        far = memory.segments[FAR]
        asyncio.get_running_loop().call_later(NETWORK_S / 2, setattr, far, "alive", False)
        assert (await read(mover, 0, where))[0] == 1
        assert memory.reach(FAR) is None
        with pytest.raises(PeerLost):
            await mover.write(0, grants(FAR, 2), pages(), [0], Priority.STORE)

    run_virtual(main())


def test_the_highest_generation_written_is_what_a_segment_announces() -> None:
    async def main() -> None:
        memory = a_memory()
        await write_all(a_mover(memory), grants(NEAR, 1, generation=40) + grants(NEAR, 2, generation=30))
        assert (memory.segments[NEAR].generation, memory.segments[FAR].generation) == (40, 0)

    run_virtual(main())
