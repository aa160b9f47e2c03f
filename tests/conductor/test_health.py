"""B42: who fails what it is given is left alone for a while, then probed; one trouble is blamed on it once."""

from conductor.health import FAILURES_MAX, OUT_S, OUT_S_MAX, RECORDS_MAX, Health
from protocol.ids import Incarnation

LIFE, OTHER = Incarnation("life"), Incarnation("other")


def failing(times: int, health: Health | None = None, at_s: float = 0.0) -> Health:
    """One failure a second, the last at `at_s`."""
    health = health or Health()
    for n in reversed(range(times)):
        health.failed(LIFE, at_s - n - 0.5, at_s - n)
    return health


def takes(health: Health, now: float, *, idle: bool = True) -> bool:
    return health.takes(LIFE, now, idle=idle)


def test_so_many_failures_in_a_row_eject_an_instance_and_fewer_do_not():
    health = failing(FAILURES_MAX - 1)
    assert takes(health, 0.0, idle=False)
    assert health.failed(LIFE, 0.0, 1.0)
    assert not takes(health, 1.0)
    assert health.takes(OTHER, 1.0, idle=False)


def test_a_success_in_between_begins_the_count_anew():
    health = failing(FAILURES_MAX - 1)
    health.succeeded(LIFE, 0.5)
    assert not health, "nothing is remembered"
    assert not health.failed(LIFE, 1.0, 2.0)
    assert takes(health, 2.0, idle=False)


def test_what_began_before_the_last_failure_says_nothing_new():
    """Many requests that one broken connection ends are one failure; an old success is no sign of health."""
    health = Health()
    assert not any(health.failed(LIFE, began_at, 10.0) for began_at in (1.0, 2.0, 3.0, 4.0))
    assert takes(health, 10.0)
    health = failing(FAILURES_MAX, at_s=10.0)
    health.succeeded(LIFE, 9.0)
    assert not takes(health, 10.0)


def test_it_is_probed_after_a_while_by_one_request_at_a_time():
    health = failing(FAILURES_MAX)
    assert not takes(health, OUT_S - 0.1)
    assert takes(health, OUT_S)
    assert not takes(health, OUT_S, idle=False)
    health.succeeded(LIFE, OUT_S)
    assert takes(health, OUT_S, idle=False)
    assert not health.ejected(LIFE)


def test_a_probe_that_fails_doubles_the_time_up_to_a_bound():
    health, now, out_s = failing(FAILURES_MAX), 0.0, OUT_S
    for _ in range(6):
        now += out_s
        assert takes(health, now)
        assert health.failed(LIFE, now, now)
        out_s = min(2 * out_s, OUT_S_MAX)
        assert not takes(health, now + out_s - 0.1)
        assert takes(health, now + out_s)


def test_it_remembers_a_bounded_number_of_lives():
    health = failing(FAILURES_MAX)
    for n in range(RECORDS_MAX):
        health.failed(Incarnation(str(n)), 0.0, 0.0)
    assert not health.ejected(LIFE)
