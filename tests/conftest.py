"""Options of the tests."""

import pytest
from hypothesis import settings

SOAK_S = 45.0
SOAK_PROCESSES_S = 20.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-s", type=float, default=None, help="seconds that the pool is soaked for")
    parser.addoption("--soak-seed", type=int, default=1, help="what the soaks draw their operations from")
    parser.addoption("--long", action="store_true", help="also what takes minutes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"soak_s", "soak_processes_s"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.timeout(2.0 * (item.config.getoption("--soak-s") or SOAK_S) + 120.0))
        if item.get_closest_marker("long") and not item.config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --long"))


@pytest.fixture
def soak_s(request: pytest.FixtureRequest) -> float:
    """How long a soak takes, beside what it needs to come to rest."""
    return float(request.config.getoption("--soak-s") or SOAK_S)


@pytest.fixture
def soak_processes_s(request: pytest.FixtureRequest) -> float:
    """The same for real processes."""
    return float(request.config.getoption("--soak-s") or SOAK_PROCESSES_S)


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether there is time to wait for what takes half a minute."""
    return bool(request.config.getoption("--long"))


@pytest.fixture
def soak_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--soak-seed"))


# A busy machine makes an example slow, and no test is of speed.
settings.register_profile("dango", deadline=None)
settings.load_profile("dango")
