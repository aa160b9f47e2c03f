"""What transformers says, greedily and in float32, as the text that a client would see."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.tokenizer import Tokenizer, open_tokenizer
from tests.engine.referee import referee, referee_of_file

TOKENS = 64


class Referee:
    """The reference model and its tokenizer. `path` is a folder, or a GGUF file."""

    def __init__(self, path: Path) -> None:
        self.model: Any = referee_of_file(path) if path.is_file() else referee(path)
        self.tokenizer: Tokenizer = open_tokenizer(path)
        self._said: dict[tuple[int, ...], str] = {}

    def says(self, prompt: Sequence[int], tokens: int = TOKENS) -> str:
        """The text of so many tokens, through the end of a turn, without control tokens."""
        key = (tokens, *prompt)
        if key not in self._said:
            self._said[key] = text(self.tokenizer, self.tokens(prompt, tokens))
        return self._said[key]

    def tokens(self, prompt: Sequence[int], tokens: int) -> list[int]:
        self.model.generation_config.eos_token_id = None
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            all_of_it = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        said: list[int] = all_of_it[0, len(prompt) :].tolist()
        return said


def text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    shown = (tokenizer.token_bytes(token) for token in tokens if not tokenizer.is_special(token))
    return b"".join(shown).decode(errors="replace")
