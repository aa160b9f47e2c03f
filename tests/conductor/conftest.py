from pathlib import Path

import pytest

from engine.tokenizer import Tokenizer, open_tokenizer
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return open_tokenizer(tiny_model(folder))
