"""The text of a stream equals the text of the whole, however tokens, characters and stop strings are cut."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.text import Delta, TextAssembler
from engine.fetch import default_model
from engine.tokenizer import Tokenizer, open_tokenizer
from engine.tokenizer_source import TokenizerSource
from tests.tiny import tiny_tokenizer

PIECES: dict[int, bytes] = dict(
    enumerate(["né".encode()[:2], "né".encode()[2:], b"a", b"b", b"ab", b"ba", b"\n", b"\xff"])
)
END = len(PIECES)


def assembler(stops: Sequence[str] = (), *, skip_special: bool = True) -> TextAssembler:
    """Over PIECES, with one control token, END."""
    return TextAssembler(
        (PIECES | {END: b"<end>"}).__getitem__, lambda token: token == END, stops, skip_special=skip_special
    )


def run(texts: TextAssembler, tokens: Sequence[int]) -> tuple[str, bool, list[Delta]]:
    """The joined text, whether a stop string ended it, and the deltas."""
    deltas = []
    for token in tokens:
        deltas.append(texts.push(token))
        if deltas[-1].finished:
            break
    text = "".join(delta.text for delta in deltas) + texts.flush()
    return text, bool(deltas) and deltas[-1].finished, deltas


def spelled(text: str, sizes: Sequence[int]) -> tuple[TextAssembler, list[int]]:
    """`text` cut into tokens of so many bytes, again and again."""
    raw, pieces, at = text.encode(), [], 0
    while at < len(raw):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(raw[at : at + size])
        at += size
    return TextAssembler(pieces.__getitem__, lambda token: False), list(range(len(pieces)))


def with_stops(text: str, sizes: Sequence[int], stops: Sequence[str]) -> tuple[str, bool, list[Delta]]:
    plain, tokens = spelled(text, sizes)
    return run(TextAssembler(plain._token_bytes, lambda token: False, stops), tokens)


def test_a_character_over_two_tokens_comes_whole():
    texts = assembler()
    assert texts.push(0) == Delta("n", False)
    assert texts.push(1) == Delta("é", False)
    assert texts.flush() == ""


def test_bad_bytes_neither_silence_nor_delay_the_text():
    """B08."""
    texts = assembler()
    assert texts.push(7).text == "\ufffd"
    assert texts.push(0).text == "n"
    assert texts.push(2).text == "\ufffda"
    assert texts.push(0).text == "n"
    assert texts.flush() == "\ufffd"


def test_control_tokens_are_left_out_or_spelled():
    assert run(assembler(), [2, END, 3])[0] == "ab"
    assert run(assembler(skip_special=False), [2, END, 3])[0] == "a<end>b"


@given(st.lists(st.integers(0, END)), st.booleans())
def test_deltas_join_to_the_decoded_whole(tokens: list[int], skip: bool):
    whole = b"".join(
        b"<end>" if token == END else PIECES[token] for token in tokens if not (skip and token == END)
    )
    assert run(assembler(skip_special=skip), tokens)[0] == whole.decode("utf-8", errors="replace")


@given(st.binary(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_any_bytes_in_any_cut_decode_as_the_whole(raw: bytes, sizes: list[int]):
    cuts, at = [], 0
    while at < len(raw):
        cuts.append(raw[at : at + sizes[len(cuts) % len(sizes)]])
        at += len(cuts[-1])
    texts = TextAssembler(cuts.__getitem__, lambda token: False)
    assert run(texts, range(len(cuts)))[0] == raw.decode("utf-8", errors="replace")


TEXT = (
    "The river is long.\nIt runs from the hills to the sea, and nobody has measured all of it; naïve 東京 counts."
)


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [7, 2, 5], [200]])
@pytest.mark.parametrize(
    "stops",
    [
        ["ver"],
        ["s long."],
        [".\nIt ru"],
        ["s from the hills"],
        ["京 c"],
        ["river is", "ver"],  # one contains another: the longer begins first
        ["iver is l", "is long"],  # two overlap
        ["never there", "sea", "all", "of"],
        ["The"],
        ["counts."],
        ["counts.!"],
    ],
)
def test_the_text_ends_where_the_first_stop_string_begins(stops: list[str], sizes: list[int]):
    """B09."""
    places = [TEXT.find(stop) for stop in stops if stop in TEXT]
    text, stopped, _ = with_stops(TEXT, sizes, stops)
    assert text == TEXT[: min(places, default=len(TEXT))]
    assert stopped == bool(places)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
)
def test_stop_strings_do_not_depend_on_the_tokens(text: str, stops: list[str], sizes: list[int]):
    places = [text.find(stop) for stop in stops if stop in text]
    assert with_stops(text, sizes, stops)[0] == text[: min(places, default=len(text))]


@given(st.text("abc", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held(text: str, stops: list[str]):
    _, stopped, deltas = with_stops(text, [1], stops)
    sent = ""
    for seen, delta in enumerate(deltas, start=1):
        sent += delta.text
        held = text[len(sent) : seen]
        assert (
            delta.finished
            or held == ""
            or any(stop.startswith(held) for stop in stops)
            or any(stop in held for stop in stops)
        )
    assert not stopped or deltas[-1].finished


def test_text_after_a_stop_string_is_never_sent():
    texts = assembler(["b"])
    assert texts.push(4) == Delta("a", True)
    assert texts.push(2) == Delta("", True)
    assert texts.flush() == ""


def test_an_empty_stop_string_stops_nothing():
    assert run(assembler([""]), [2, 3])[:2] == ("ab", False)


def test_no_stop_string_begins_before_the_minimum():
    texts = assembler(["ab"])
    assert texts.push(4, match_stops=False) == Delta("ab", False)
    assert texts.push(2, match_stops=False) == Delta("a", False)
    assert texts.push(3) == Delta("b", False)
    assert texts.push(4) == Delta("", True)


def tiny() -> Tokenizer:
    return Tokenizer(TokenizerSource(tiny_tokenizer(), None, frozenset(), None, {}))


def same_as_whole(tokenizer: Tokenizer, seed: int, count: int) -> None:
    drawn = random.Random(seed).choices(range(tokenizer.vocab), k=count)
    for skip in (True, False):
        texts = TextAssembler(tokenizer.token_bytes, tokenizer.is_special, skip_special=skip)
        whole = tokenizer._parsing.decode(drawn, skip_special_tokens=skip)
        assert run(texts, drawn)[0] == tokenizer.decode(drawn, skip_special=skip) == whole


def test_random_tokens_of_a_tiny_tokenizer():
    tokenizer = tiny()
    for seed in range(50):
        same_as_whole(tokenizer, seed, 64)


@pytest.mark.model
def test_random_tokens_of_the_default_model():
    """B08: 50 seeds of 64 random tokens are full of broken characters."""
    tokenizer = open_tokenizer(default_model())
    for seed in range(50):
        same_as_whole(tokenizer, seed, 64)
