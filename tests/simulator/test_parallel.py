"""How many processes there are changes nothing but the time it takes."""

from math import factorial, sqrt

import pytest

from simulator.parallel import in_order

NAMED = {"one": 1, "two": 2, "three": 3}


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_results_come_in_the_order_given_with_a_word_for_each(jobs: int) -> None:
    told: list[str] = []
    assert in_order(factorial, NAMED, jobs, told.append) == [1, 2, 6]
    assert [sentence.split()[0] for sentence in told] == ["1/3", "2/3", "3/3"]
    assert [sentence.rpartition(": ")[2] for sentence in told] == ["one", "two", "three"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_fault_in_a_process_is_raised_here(jobs: int) -> None:
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        in_order(sqrt, {"fine": 4.0, "not": -1.0}, jobs, lambda sentence: None)


def test_nothing_to_do_is_done() -> None:
    assert in_order(factorial, {}, 4, lambda sentence: None) == []
