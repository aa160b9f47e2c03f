"""A running mean."""

import pytest

from conductor.mean import MEAN_SAMPLES, Mean


def test_a_running_mean_follows_what_changes():
    mean = Mean()
    for _ in range(5 * MEAN_SAMPLES):
        mean.add(1.0)
    for _ in range(5 * MEAN_SAMPLES):
        mean.add(2.0)
    assert mean.value == pytest.approx(2.0, abs=0.01)
