"""Leases that are held as long as needed, and the line in front of a full pool."""

import asyncio

import pytest

from conductor.lease import HeldLease, Room
from kvcache_pool.api import Acquire, Directory, DirectoryLink, Lease, PoolFull, new_lease
from protocol.errors import DeadlineExceeded, PeerLost
from protocol.ids import BlockHash, LeaseId


class CountingDirectory(Directory):
    """Room for so many blocks; grants take a moment, as over a network."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held: dict[LeaseId, int] = {}
        self.order: list[str] = []
        self.away = False
        self.release_s = 0.0
        self.late = False

    async def acquire(self, ask: Acquire) -> Lease:
        wanted = len(ask.blocks)
        if sum(self.held.values()) + wanted > self.blocks:
            raise PoolFull(f"{wanted} blocks")
        self.held[ask.lease] = wanted
        await asyncio.sleep(0.01)
        self.order.append(ask.owner)
        if self.late:
            raise DeadlineExceeded("granted, but nobody has heard")
        return Lease(ask.lease, [], [], [])

    async def release(self, lease: LeaseId) -> None:
        await asyncio.sleep(self.release_s)
        if self.away:
            raise PeerLost("away")
        self.held.pop(lease, None)


class Link(DirectoryLink):
    def __init__(self, directory: Directory) -> None:
        self._fixed = directory

    def get(self) -> Directory:
        return self._fixed


def an_acquire(owner: str, blocks: int) -> Acquire:
    return Acquire(new_lease(), owner, [BlockHash(b"x")] * blocks, 0, 0, None)


def a_hold(directory: Directory, room: Room, owner: str, blocks: int) -> HeldLease:
    return HeldLease(Link(directory), room, an_acquire(owner, blocks))


async def test_a_lease_is_given_back_once_whether_early_or_at_the_end():
    directory, room = CountingDirectory(4), Room()
    async with a_hold(directory, room, "a", 4):
        assert len(directory.held) == 1
    held = a_hold(directory, room, "b", 4)
    async with held:
        await held.give_back()
        await held.give_back()
        assert directory.held == {}
        async with a_hold(directory, room, "c", 4):
            pass
    assert directory.held == {}


async def test_requests_wait_for_room_in_order_and_the_long_one_is_not_overtaken():
    directory, room = CountingDirectory(4), Room()

    async def request(owner: str, blocks: int) -> None:
        async with a_hold(directory, room, owner, blocks):
            await asyncio.sleep(0.02)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for owner, blocks in (("a", 2), ("long", 4), ("b", 1), ("c", 1)):
            tasks.create_task(request(owner, blocks))
    assert directory.order == ["a", "long", "b", "c"]


async def test_without_a_lease_of_ours_that_could_end_a_full_pool_refuses():
    directory, room = CountingDirectory(4), Room()
    with pytest.raises(PoolFull):
        async with a_hold(directory, room, "a", 5):
            pass


async def test_one_who_leaves_the_line_does_not_hold_it_up():
    directory, room = CountingDirectory(4), Room()
    async with a_hold(directory, room, "a", 4):
        waiting = asyncio.create_task(a_hold(directory, room, "gone", 4).__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), a_hold(directory, room, "b", 4):
        assert len(directory.held) == 1


async def test_a_grant_that_nobody_waits_for_any_more_is_given_back():
    directory, room = CountingDirectory(4), Room()
    entering = asyncio.create_task(a_hold(directory, room, "gone", 4).__aenter__())
    await asyncio.sleep(0.005)  # granted there, and the answer is on its way
    assert len(directory.held) == 1
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    assert directory.held == {}


async def test_a_directory_that_is_away_at_the_end_does_not_fail_the_request():
    directory, room = CountingDirectory(4), Room()
    async with a_hold(directory, room, "a", 1):
        directory.away = True


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02])
async def test_a_client_that_leaves_while_the_lease_goes_back_neither_stops_it_nor_is_lost_in_it(after_s: float):
    directory, room = CountingDirectory(4), Room()
    directory.release_s = 0.01
    went_on = False

    held = a_hold(directory, room, "a", 4)

    async def request() -> None:
        nonlocal went_on
        async with held:
            held.give_back()
            await asyncio.sleep(0.05)
            went_on = True

    task = asyncio.create_task(request())
    await asyncio.sleep(0.015 + after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not went_on
    assert directory.held == {}
    with pytest.raises(PoolFull):  # at once: no lease of ours is out that could make room
        async with asyncio.timeout(1), a_hold(directory, room, "b", 5):
            pass


async def test_a_grant_that_came_too_late_is_given_back():
    directory, room = CountingDirectory(4), Room()
    directory.late = True
    with pytest.raises(DeadlineExceeded):
        async with a_hold(directory, room, "a", 4):
            pass
    assert directory.held == {}
