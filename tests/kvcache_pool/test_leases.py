"""Leases by themselves."""

from kvcache_pool.api import new_lease
from kvcache_pool.leases import Claim, Leases


def a_book() -> Leases:
    return Leases()


def granted(leases: Leases, owner: str, end: float) -> Claim:
    """A claim on nothing."""
    claim = Claim(new_lease(), owner, end, [], [], [])
    leases.grant(claim)
    return claim


def test_a_name_is_taken_until_its_lease_is_gone() -> None:
    leases = a_book()
    claim = granted(leases, "r", 1.0)
    assert claim.lease in leases
    assert leases.overdue(1.0) == [claim]
    leases.linger(claim, 9.0)
    assert claim.lease in leases
    leases.end(claim.lease)
    assert claim.lease not in leases


def test_overdue_leases_come_in_the_order_of_their_ends_and_once() -> None:
    leases = a_book()
    for owner, end in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("b2", 2.0)):
        granted(leases, owner, end)
    assert [claim.owner for claim in leases.overdue(0.9)] == []
    assert [claim.owner for claim in leases.overdue(2.0)] == ["a", "b", "b2"]
    leases.check()
    assert [claim.owner for claim in leases.overdue(99.0)] == ["c"]
    assert len(leases) == 0


def test_a_renewed_lease_is_overdue_at_its_new_end_only() -> None:
    leases = a_book()
    lease = granted(leases, "r", 1.0).lease
    assert leases.renew(lease, 5.0)
    assert leases.renew(lease, 2.0)
    assert leases.overdue(4.9) == []
    leases.check()
    assert [claim.lease for claim in leases.overdue(5.0)] == [lease]
    assert not leases.renew(lease, 9.0)


def test_a_released_lease_is_gone_and_never_overdue() -> None:
    leases = a_book()
    claim = granted(leases, "r", 1.0)
    assert leases.find(claim.lease) is claim
    assert leases.end(claim.lease) is claim
    assert leases.find(claim.lease) is None
    assert leases.end(claim.lease) is None
    assert leases.overdue(9.0) == []
    leases.check()


def test_a_late_lease_lapses_unless_it_is_ended_before() -> None:
    leases = a_book()
    for end in (1.0, 2.0, 3.0):
        granted(leases, "r", end)
    one, two, three = leases.overdue(3.0)
    for claim, until in ((one, 11.0), (two, 12.0), (three, 13.0)):
        leases.linger(claim, until)
    leases.check()
    assert leases.find(one.lease) is None
    assert leases.end(two.lease) is two
    assert leases.lapsed(10.9) == []
    assert leases.lapsed(12.0) == [one]
    assert leases.lapsed(13.0) == [three]
