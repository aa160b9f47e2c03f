"""Tokens to text, piece by piece: whole characters only, and never a piece of a stop string. Pure."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenBytes = Callable[[int], bytes]
"""What a token stands for, in UTF-8; a token may end in the middle of a character."""


@dataclass(frozen=True)
class Delta:
    """What a token adds to the text that the client sees."""

    text: str
    finished: bool
    """A stop string has been met: the text ends here, before it."""


class TextAssembler:
    """One choice's text, from its tokens.

    Always: the deltas joined, with `flush`, are the decoded bytes of all tokens, up to where the first stop
    string begins, however the tokens cut the text. Bytes that are no UTF-8 become U+FFFD where the decoding of
    the whole has it, and as soon as it is sure.

          sent to the client | held: may begin a stop string | bytes of an unfinished character
        ---------------------+-------------------------------+---------------------------------> tokens

    Mutates: push, flush.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        is_special: Callable[[int], bool],
        stops: Sequence[str] = (),
        *,
        skip_special: bool = True,
    ) -> None:
        """`stops`: strings that end the text; empty ones are no stop. skip_special leaves control tokens out."""
        self._token_bytes = token_bytes
        self._is_special = is_special
        self._stops = [stop for stop in stops if stop]
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._finished = False

    def push(self, token: int, *, match_stops: bool = True) -> Delta:
        """Take the next token; what can be sent now. After a stop string everything is empty.

        match_stops=False: the output is still shorter than its minimum; no stop string begins in this text.
        """
        if self._finished:
            return Delta("", True)
        text = self._held + self._decoder.decode(self._visible(token))
        self._held = ""
        if not match_stops:
            return Delta(text, False)
        match, doubt = self._match(text), self._doubt(text)
        if match is not None and match <= doubt:
            self._finished = True
            return Delta(text[:match], True)
        self._held = text[doubt:]
        return Delta(text[:doubt], False)

    def flush(self) -> str:
        """The rest, when no more tokens come: nothing after a stop string."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        if self._finished:
            return ""
        self._finished = True
        return text[: self._match(text)]

    def _visible(self, token: int) -> bytes:
        return b"" if self._skip_special and self._is_special(token) else self._token_bytes(token)

    def _match(self, text: str) -> int | None:
        """Where the first stop string in `text` begins."""
        return min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)

    def _doubt(self, text: str) -> int:
        """Where the longest end of `text` begins that may become a stop string with what follows."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(len(text), longest), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return len(text) - size
        return len(text)
