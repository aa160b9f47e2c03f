from pathlib import Path

import pytest

from engine.tokenizer import Tokenizer, open_tokenizer
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return open_tokenizer(folder)
