"""Long texts are tokenised without the interpreter's lock: the event loop must go on meanwhile."""

import threading
from pathlib import Path

import pytest

from engine.tokenizer import LONG_CHARS, Tokenizer, open_tokenizer
from tests.tiny import tiny_model

PIECE = " a block is a run."
LONG = PIECE * 30_000


class Beats:
    """Counts in a thread of its own, for as long as the context is entered."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> "Beats":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(0.001):
            self.count += 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return open_tokenizer(tiny_model(folder))


@pytest.mark.parametrize("special", [True, False])
def test_other_threads_run_while_a_long_text_is_tokenised(tokenizer: Tokenizer, special: bool) -> None:
    with Beats() as beats:
        before = beats.count
        tokenizer.encode(LONG, special=special)
        assert beats.count - before > 20


def test_both_ways_to_tokenise_give_the_same(tokenizer: Tokenizer) -> None:
    times = LONG_CHARS // len(PIECE)
    once = tokenizer.encode(PIECE, special=True)
    assert tokenizer.encode(PIECE * times, special=True) == once * times
    assert tokenizer.encode(PIECE * (times + 1), special=True) == once * (times + 1)
