"""What a report says of the machine."""

import pytest

from bench.machine import OTHERS_CORES_MAX, Watch, machine_facts, watched


@pytest.mark.parametrize(("cores", "warns"), [(0.0, False), (OTHERS_CORES_MAX, False), (0.5, True)])
def test_it_warns_when_others_were_busy(cores: float, warns: bool) -> None:
    told = Watch(load_before=0.1, load_after=1.2, others_cores=cores).facts(alone=True)
    assert told["load average"] == "0.10 before, 1.20 after"
    assert ("WARNING" in told) is warns


def test_it_says_nothing_of_others_when_the_service_is_one_of_them() -> None:
    assert set(Watch(0.1, 1.2, others_cores=2.0).facts(alone=False)) == {"load average"}


def test_a_watch_ends_with_both_loads_and_a_share_that_can_be() -> None:
    with watched() as watch:
        sum(range(100_000))
    assert min(watch.load_before, watch.load_after, watch.others_cores) >= 0


def test_the_machine_is_named() -> None:
    told = machine_facts()
    assert set(told) == {"processor", "system", "torch"}
    assert " cores" in told["processor"]
    assert all(told.values())
