"""Tokens with their log probabilities, as clients are told them."""

import codecs
from collections.abc import Set

from conductor.order import Vocabulary
from conductor.shapes import Spelled, Told, finite
from engine.api import Sampled


class Teller:
    """Spells the tokens of one choice. Owns how far the choice's text has come, in characters."""

    def __init__(self, vocabulary: Vocabulary, hidden: Set[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def tell(self, sampled: Sampled) -> Told:
        """The next token with its alternatives; a missing logprob counts as impossible."""
        logprob = float("nan") if sampled.logprob is None else sampled.logprob
        chosen = self._spelled(sampled.token, logprob)
        pairs = zip(sampled.top_tokens, sampled.top_logprobs, strict=True)
        told = Told(chosen, [self._spelled(token, value) for token, value in pairs], self._characters)
        self._characters += len(self._decoder.decode(chosen.data))
        return told

    def _spelled(self, token: int, logprob: float) -> Spelled:
        data = self._vocabulary.token_bytes(token)
        shown = token not in self._hidden and not self._vocabulary.is_special(token)
        return Spelled(_name(data), data if shown else b"", finite(logprob))


def _name(data: bytes) -> str:
    """A token that is no text by itself is spelled byte by byte, as OpenAI does: two such never look the same."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
