"""Options of the tests."""

import pytest
from hypothesis import settings

SOAK_S = 45.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-s", type=float, default=SOAK_S, help="seconds that the pool is soaked for")
    parser.addoption("--soak-seed", type=int, default=1, help="what the soaks draw their operations from")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "soak_s" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(2.0 * item.config.getoption("--soak-s") + 120.0))


@pytest.fixture
def soak_s(request: pytest.FixtureRequest) -> float:
    """How long a soak takes, beside what it needs to come to rest."""
    return float(request.config.getoption("--soak-s"))


@pytest.fixture
def soak_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--soak-seed"))


# A busy machine makes an example slow, and no test is of speed.
settings.register_profile("dango", deadline=None)
settings.load_profile("dango")
