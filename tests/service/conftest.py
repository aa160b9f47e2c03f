"""Models that the services of these tests serve, and a plain service for a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.processes import Service
from tests.tiny import tiny_model

DEEP_LAYERS = 32


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small layers: a step takes so long that one can act between two."""
    return tiny_model(tmp_path_factory.mktemp("model") / "deep", num_hidden_layers=DEEP_LAYERS)


@pytest.fixture(scope="module")
def service(tiny: Path) -> Iterator[Service]:
    """One instance of each pool, in float32."""
    with Service(tiny, "--dtype", "float32") as service:
        yield service
