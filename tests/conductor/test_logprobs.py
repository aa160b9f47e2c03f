"""Tokens with their log probabilities."""

import random

from conductor.logprobs import Teller
from conductor.text import TextAssembler
from engine.api import Sampled
from engine.tokenizer import Tokenizer

ODD = frozenset[int]()


def test_part_of_a_character_is_spelled_byte_by_byte_and_offsets_count_characters(tokenizer: Tokenizer) -> None:
    ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab)}
    teller = Teller(tokenizer, ODD)
    told = [teller.tell(Sampled(ids[byte], -1.0)) for byte in (b"a", b"\xc3", b"\xb6", b"b")]
    assert [token.chosen.name for token in told] == ["a", "bytes:\\xc3", "bytes:\\xb6", "b"]
    assert [token.offset for token in told] == [0, 1, 1, 2]
    assert b"".join(token.chosen.data for token in told).decode() == "aöb"


def test_token_bytes_rebuild_the_answer(tokenizer: Tokenizer) -> None:
    """B20: the bytes of all tokens, joined, are the text's, control tokens and broken characters included."""
    tokens = random.Random(20).choices(range(tokenizer.vocab), k=200) + sorted(tokenizer.stop_tokens)
    texts, teller = TextAssembler(tokenizer.token_bytes, tokenizer.is_special), Teller(tokenizer, ODD)
    text = "".join([*(texts.push(token).text for token in tokens), texts.flush()])
    told = b"".join(teller.tell(Sampled(token, -1.0)).chosen.data for token in tokens)
    assert told.decode(errors="replace") == text
    assert "\ufffd" in text


def test_a_token_that_is_not_shown_has_a_name_and_no_bytes(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.stop_tokens)
    told = Teller(tokenizer, frozenset({40})).tell(Sampled(40, -1.0, [special, 41], [-2.0, -3.0]))
    assert (told.chosen.data, told.chosen.name) == (b"", tokenizer.decode([40]))
    assert [(other.name, bool(other.data)) for other in told.top] == [
        (tokenizer.decode([special]), False),
        (tokenizer.decode([41]), True),
    ]
