"""Leases that are held as long as needed, and the line in front of a full pool."""

import asyncio

import pytest

from conductor.lease import HeldLease, Room
from kvcache_pool.api import Acquire, Directory, DirectoryLink, Lease, PoolFull, QuotaExceeded, new_lease
from protocol.errors import DeadlineExceeded, PeerLost
from protocol.ids import NO_TENANT, BlockHash, LeaseId, TenantId


class CountingDirectory(Directory):
    """Room for so many blocks; grants take a moment, as over a network."""

    def __init__(self, blocks: int, quota: int = 10**6) -> None:
        self.blocks = blocks
        self.quota = quota
        self.held: dict[LeaseId, int] = {}
        self.tenants: dict[LeaseId, TenantId] = {}
        self.asked = 0
        self.order: list[str] = []
        self.away = False
        self.release_s = 0.0
        self.late = False

    async def acquire(self, ask: Acquire) -> Lease:
        wanted = len(ask.blocks)
        self.asked += 1
        self.tenants[ask.lease] = ask.tenant
        if sum(self.held[lease] for lease in self.held if self.tenants[lease] == ask.tenant) + wanted > self.quota:
            raise QuotaExceeded(f"{wanted} blocks")
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


def an_acquire(owner: str, blocks: int, tenant: int = NO_TENANT) -> Acquire:
    return Acquire(new_lease(), owner, [BlockHash(b"x")] * blocks, 0, 0, None, tenant=TenantId(tenant))


def a_hold(directory: Directory, room: Room, owner: str, blocks: int, tenant: int = NO_TENANT) -> HeldLease:
    return HeldLease(Link(directory), room, an_acquire(owner, blocks, tenant))


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


async def test_at_its_quota_a_tenant_waits_for_its_own_leases_and_in_nobodys_way():
    directory, room = CountingDirectory(8, quota=4), Room()

    async def request(owner: str, blocks: int, tenant: int) -> None:
        async with a_hold(directory, room, owner, blocks, tenant):
            await asyncio.sleep(0.05)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for owner, blocks, tenant in (("x1", 4, 1), ("x2", 4, 1), ("x3", 1, 1), ("y1", 2, 2), ("y2", 2, 2)):
            tasks.create_task(request(owner, blocks, tenant))
    assert directory.order == ["x1", "y1", "y2", "x2", "x3"]
    assert directory.asked <= 8, "it asks again when something was given back, not before"
    assert room._tenants == {}


async def test_a_quota_without_a_lease_of_its_own_that_could_end_refuses_whoever_else_holds_some():
    directory, room = CountingDirectory(8, quota=4), Room()
    async with a_hold(directory, room, "y", 4, tenant=2):
        with pytest.raises(QuotaExceeded):
            async with asyncio.timeout(1), a_hold(directory, room, "x", 5, tenant=1):
                pass
    assert room._tenants == {}


async def test_one_who_leaves_his_tenants_line_does_not_hold_it_up():
    directory, room = CountingDirectory(8, quota=4), Room()
    async with a_hold(directory, room, "x", 4, tenant=1):
        waiting = asyncio.create_task(a_hold(directory, room, "gone", 4, tenant=1).__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), a_hold(directory, room, "x2", 4, tenant=1):
        assert len(directory.held) == 1
    assert room._tenants == {}


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
