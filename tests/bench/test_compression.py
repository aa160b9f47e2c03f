"""Prompts that are real and different, and figures that say nothing where nothing was done."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.compression import ANSWER, Figures
from bench.passages import TOKENS, passages
from engine.tokenizer import open_tokenizer
from protocol.settings import SettingsError
from tests.bench.test_bench import measured
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


def test_passages_are_different_and_as_long_as_they_should_be(model: Path) -> None:
    tokenizer = open_tokenizer(model)
    prompts = passages(tokenizer, 12)
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    assert all("Sum up this passage" in text for text in texts)
    endings = [tuple(prompt[-60:]) for prompt in prompts]
    assert len(set(endings)) == 12
    ask = len(prompts[0]) - TOKENS[0]
    assert [len(prompt) - ask for prompt in prompts] == pytest.approx(TOKENS * 3, abs=12)
    assert passages(tokenizer, 5) == prompts[:5]
    with pytest.raises(SettingsError, match="the documents have text for"):
        passages(tokenizer, 100_000)


def test_errors_are_of_keys_and_values_apart_and_divergence_is_of_distributions() -> None:
    found, exact = Figures(), torch.zeros(2, 2, 5, 1, 4)
    other = exact.clone()
    other[1, 0, 3, 0, 1] = -2.0
    other[:, 1] = 0.5
    found.note_kv(exact, other)
    assert (found.key_max, found.value_max) == ([2.0], [0.5])
    assert [*found.key_mean, *found.value_mean] == pytest.approx([2.0 / 40, 0.5])
    even, sure = np.zeros((3, 2), np.float32), np.tile(np.float32([np.log(3), 0]), (3, 1))
    found.note_scores(even, sure)
    assert found.logits == pytest.approx([np.log(3) / 2])
    assert found.divergence == pytest.approx([0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)])
    found.note_scores(sure, sure)
    assert (found.logits[1], found.divergence[1]) == (0, 0)


@pytest.mark.cluster
def test_without_compression_all_is_as_it_was_and_with_it_nearly(model: Path, tmp_path: Path) -> None:
    rows = measured(model, tmp_path, "compression", "--prompts", "3")
    median = {name: row["measured"]["median"] for name, row in rows.items()}
    assert rows["none: texts that differ, of 3"]["within"]
    assert median[f"none: same tokens of {ANSWER}, mean"] == ANSWER
    assert median["none: error of keys, greatest"] == median["none: difference of logits, mean"] == 0
    assert 0 < median["int8: error of keys, mean"] < median["fp8: error of keys, mean"]
    assert 0 < median["int8: divergence of the next token"] < median["fp8: divergence of the next token"]
    assert median["decoded alone: error of keys, greatest"] == 0
    assert rows["int8: bytes of a block"]["ratio"] == pytest.approx(0.594, abs=0.001)
    assert all(rows[name]["ratio"] > 0 for name in rows if "memcpy" in name)
