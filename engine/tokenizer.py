"""Text to tokens and back, exactly as the model's own tokenizer does it, with control tokens kept apart."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine.api import PromptTooLong
from engine.chat_template import ChatTemplate, NoChatTemplate, Spellings, escaped, mark_for
from engine.tokenizer_source import TokenizerError, TokenizerSource, read_file, read_folder

__all__ = ["Tokenizer", "TokenizerError", "open_tokenizer"]

LONG_CHARS = 4096
"""The library's `encode` keeps the interpreter's lock, which for a long text stops every other thread for
seconds; its batch calls give the lock up, but cost a short text ten times more."""

SHRINKS = {None: 1, "NFC": 3}
"""How many bytes of a text can become one, by normalizer: composing makes 3 bytes of 9 in a Hangul syllable."""

KEEPS = frozenset({"ByteLevel", "Digits", "Split"})
"""Steps before the vocabulary that cut a text and drop nothing of it (`Split` is asked what it does)."""


def open_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a model: a GGUF file, or a Hugging Face folder with a tokenizer.json.

    Raises TokenizerError if it cannot be rebuilt exactly, TemplateError if its chat template is broken.
    """
    if path.is_dir():
        return Tokenizer(read_folder(path))
    if path.suffix == ".gguf":
        return Tokenizer(read_file(path))
    raise TokenizerError(f"{path} is neither a GGUF file nor a folder with a tokenizer.json")


class Tokenizer:
    """One model's tokenizer. Unchanged after construction, so threads share it freely.

    Parsing control tokens is a switch inside the library's object; flipping it under other threads' feet would
    let a client's text through as control tokens. So there is one object for each way to read a text.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._parsing = source.backend  # finds control tokens
        self._literal = _literal(source.backend)  # reads their spellings as text
        self._inner = _literal(_without_prefix(source.backend))  # the same for a text that is not the first
        self._start = source.start
        self._template = None if source.template is None else ChatTemplate(source.template, source.names)
        added = source.backend.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._spellings = Spellings(self._special.values())
        self._bytes = _all_bytes(source.backend)
        self.stop_tokens = source.stops
        """End of turn and end of text."""

    @property
    def vocab(self) -> int:
        """How many ids there are; the model's own output may be padded to more."""
        return len(self._bytes)

    def encode(self, text: str, *, special: bool, below: int | None = None) -> list[int]:
        """The ids of `text`, after the start token where the model wants one; it is never there twice.

        special=True reads the spellings of control tokens as these tokens, special=False as plain text. Raises
        PromptTooLong, at no cost, for a text so large that it cannot be fewer than `below` tokens.
        """
        self._require_below(below, text)
        ids = self._ids(self._parsing, text) if special else self._plain(text, first=True)
        if self._start is not None and ids[:1] != [self._start]:
            ids.insert(0, self._start)
        return ids

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        below: int | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt for a conversation (see `normalise_messages`), by the model's chat template.

        The template alone writes control tokens, the start token included: in messages, tools and variables
        their spellings are text. Raises TemplateError; NoChatTemplate if the model has no template; PromptTooLong
        as `encode` does: for the rendered text, since a template may leave out what it was given.
        """
        if self._template is None:
            raise NoChatTemplate("this model has no chat template; send a prompt to /v1/completions instead")
        given = [list(messages), list(tools or []), dict(variables or {})]
        mark = mark_for(self._template.source, *_texts(given))
        broken = self._spellings.break_all(given, mark)
        text = self._template.render(
            broken[0],
            tools=broken[1] or None,
            variables=broken[2],
            add_generation_prompt=add_generation_prompt,
        )
        if broken == given:
            self._require_below(below, text)
            return self._ids(self._parsing, text)
        self._require_below(below, _unmarked(text, mark))
        return self._marked(text, mark)

    def tokens_at_least(self, text: str) -> int:
        """How many tokens `text` has for certain, from its size alone; 0 where the tokenizer may drop text."""
        if self._most_bytes is None:
            return 0
        data = text.encode("utf-8", "surrogatepass").translate(None, self._unspelled)
        return -(-len(data) // self._most_bytes)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for. A control token stands for its spelling, an id without a token for nothing."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def is_special(self, token: int) -> bool:
        """Whether it is a control token, which is not part of the text."""
        return token in self._special

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of the tokens; U+FFFD stands for bytes that are not UTF-8."""
        kept = (token for token in ids if not (skip_special and token in self._special))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def digest(self) -> str:
        """SHA-256 of all that decides how texts become ids: equal digests, equal prompts. 64 hex digits."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = json.loads(self._parsing.to_str())
        parts = [state["model"], state["added_tokens"], state["normalizer"], state["pre_tokenizer"]]
        parts += [self._start, None if self._template is None else self._template.source]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _most_bytes(self) -> int | None:
        """The most bytes of a text that one token can stand for; None if there is no telling."""
        state = json.loads(self._parsing.to_str())
        shrinks = SHRINKS.get((state["normalizer"] or {"type": None})["type"])
        if shrinks is None or not _keeps_all(self._parsing, state):
            return None
        if shrinks > 1 and self._unspelled:  # characters may be composed of bytes that are dropped
            return None
        return shrinks * max(map(len, self._bytes), default=1)

    @cached_property
    def _unspelled(self) -> bytes:
        """The bytes that have no token: a byte-level vocabulary may lack rare ones, and drops them from a text."""
        return bytes(byte for letter, byte in _BYTES.items() if self._parsing.token_to_id(letter) is None)

    def _require_below(self, below: int | None, text: str) -> None:
        if below is not None and (tokens := self.tokens_at_least(text)) >= below:
            raise PromptTooLong(tokens)

    @staticmethod
    def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        if len(text) <= LONG_CHARS:
            return backend.encode(text, add_special_tokens=False).ids
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _plain(self, text: str, *, first: bool) -> list[int]:
        """`text` without a control token, come what may."""
        ids = self._ids(self._literal if first else self._inner, text)
        if self._special.keys().isdisjoint(ids):
            return ids
        # Merges of ordinary tokens can end in a control token. Nothing merges across a cut.
        mark = mark_for(text)
        pieces = self._spellings.break_text(text, mark).split(mark)
        head = self._ids(self._literal if first else self._inner, pieces[0])
        return head + [token for piece in pieces[1:] for token in self._ids(self._inner, piece)]

    def _marked(self, text: str, mark: str) -> list[int]:
        """A rendered prompt with marks in it: the control tokens found now are the template's own."""
        encoding = self._parsing.encode_batch([text], add_special_tokens=False)[0]
        ids: list[int] = []
        done = 0
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # An unknown character also gives a control token, though nothing there spells it.
            if self._special.get(token) == text[begin:end].strip():
                ids += [*self._plain(_unmarked(text[done:begin], mark), first=done == 0), token]
                done = end
        return ids + self._plain(_unmarked(text[done:], mark), first=done == 0)


def _unmarked(text: str, mark: str) -> str:
    return text.replace(mark, "").replace(escaped(mark), "")


def _keeps_all(backend: tokenizers.Tokenizer, state: Mapping[str, Any]) -> bool:
    """Whether every byte of a text is in one of its tokens, if it has a token at all: nothing is cut away."""
    step = state["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    cut = all(part.get("type") in KEEPS and part.get("behavior") != "Removed" for part in steps)
    trimmed = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    return cut and not trimmed and any(part.get("type") == "ByteLevel" for part in steps)


def _literal(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = True
    return copy


def _without_prefix(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for a text in the middle: some put a space before the first text only."""
    state = json.loads(backend.to_str())
    step = state["pre_tokenizer"] or {}
    found = [part for part in step.get("pretokenizers", [step]) if part.get("prepend_scheme") == "first"]
    for part in found:
        part["prepend_scheme"] = "never"
    return tokenizers.Tokenizer.from_str(json.dumps(state)) if found else backend


def _texts(value: Any) -> Iterable[str]:
    """Every string in a value of lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _all_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """For every id, the bytes it stands for; the decoder tells in which alphabet the vocabulary is written."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    read = _from_byte_alphabet if _has_byte_alphabet(backend) else _from_sentence_piece
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        table[number] = token.encode() if token in added else read(token)
    return table


def _has_byte_alphabet(backend: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(backend.to_str())["decoder"] or {}
    return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: visible Latin-1 characters stand for themselves, the others follow from 256."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    codes = [_BYTES.get(character) for character in token]
    return token.encode() if None in codes else bytes(code for code in codes if code is not None)


def _from_sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
