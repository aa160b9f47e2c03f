"""B42: second attempts are a share of all requests; a burst is made good, for one loss of everything in flight."""

from conductor.retries import SHARE, Retries


def test_everything_in_flight_may_be_lost_once():
    retries = Retries(4)
    assert retries.take(3)
    assert not retries.take(2), "all of it or nothing"
    assert retries.take(1)
    assert not retries.take(1)


def test_after_that_second_attempts_are_a_share_of_the_requests():
    retries, tried = Retries(4), 0
    assert retries.take(4)
    for _ in range(1000):
        retries.came()
        tried += retries.take(1)
    assert abs(tried - 1000 * SHARE) <= 1


def test_a_quiet_time_saves_up_no_more_than_at_first():
    retries = Retries(2)
    for _ in range(1000):
        retries.came()
    assert retries.take(2)
    assert not retries.take(1)


def test_who_needs_nothing_is_not_refused():
    retries = Retries(1)
    assert retries.take(1)
    assert retries.take(0)
