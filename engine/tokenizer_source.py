"""Where a tokenizer comes from: the metadata of a GGUF file, or the files of a Hugging Face folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.gguf_file import read_gguf

STOP_SPELLINGS = frozenset(
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "</s>",
    ]
)
"""Control tokens that end a turn or a text in the models we serve: a file often names only one of its own."""


class TokenizerError(ValueError):
    """The model's tokenizer cannot be rebuilt here. The text says what was found and what would do."""


@dataclass(frozen=True)
class TokenizerSource:
    """What a model's files say about its tokenizer."""

    backend: tokenizers.Tokenizer
    start: int | None
    """The token that the model wants before every text, or None."""
    stops: frozenset[int]
    template: str | None
    names: dict[str, str]
    """Spellings for the chat template: `bos_token` and so on."""


# --- Hugging Face folder ---------------------------------------------------------------------------------------


def read_folder(folder: Path) -> TokenizerSource:
    """Raises TokenizerError when the folder has no tokenizer.json, or one that cannot be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json; save the tokenizer in the fast format")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    names = _names({**_read_json(folder / "special_tokens_map.json"), **config})
    stops = {backend.token_to_id(names["eos_token"])} if "eos_token" in names else set()
    vocab = _folder_vocab(folder, backend)
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        for token in eos if isinstance(eos, list) else [] if eos is None else [eos]:
            stops.add(_known(token, vocab, f"{folder.name}: {name}: eos_token_id"))
    return TokenizerSource(
        backend=backend,
        start=_folder_start(backend, config, names),
        stops=frozenset(stop for stop in stops if isinstance(stop, int)) | _spelled_stops(backend),
        template=_folder_template(folder, config),
        names=names,
    )


def _folder_vocab(folder: Path, backend: tokenizers.Tokenizer) -> int:
    """How many ids there are: a model's own output may be padded to more than the tokenizer's."""
    told = _read_json(folder / "config.json").get("vocab_size")
    return max(told if type(told) is int else 0, backend.get_vocab_size(with_added_tokens=True))


def _known(token: Any, vocab: int, name: str) -> int:
    if type(token) is not int:
        raise TokenizerError(f"{name} must be a token's id, not {token!r:.40}")
    if not 0 <= token < vocab:
        raise TokenizerError(f"{name} is {token}, outside the vocabulary of {vocab}")
    return token


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return content


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Each special token's spelling; files write it as a string or as an object with `content`."""
    kinds = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    found = {kind: config.get(kind) for kind in kinds}
    plain = {kind: token.get("content") if isinstance(token, Mapping) else token for kind, token in found.items()}
    return {kind: token for kind, token in plain.items() if isinstance(token, str)}


def _folder_start(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]
) -> int | None:
    """`add_bos_token` where it is written; otherwise what the post-processor puts before the text."""
    flag = config.get("add_bos_token")
    if flag is not None:
        return backend.token_to_id(names["bos_token"]) if flag and "bos_token" in names else None
    without, added = backend.encode("a", add_special_tokens=False), backend.encode("a")
    before = len(added.ids) - len(without.ids) if added.ids[-len(without.ids) :] == without.ids else 0
    return added.ids[0] if before == 1 else None


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


# --- GGUF file ---------------------------------------------------------------------------------------------------

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Split:
    """How a byte-level vocabulary cuts text before it merges."""

    pattern: str | None = None
    """None: GPT-2's own, which the library has built in."""
    digits: bool = False
    """Every digit is a piece of its own before anything else is looked at."""
    whole: bool = False
    """A piece that is itself in the vocabulary is taken whole, whatever the merges say."""
    composed: bool = False
    """Text is brought into Unicode's composed form (NFC) first."""
    start: bool = False
    """The start token is added if the file does not say."""


SPLITS = {
    "smollm": Split(digits=True),
    "llama-bpe": Split(LLAMA3_SPLIT, whole=True, start=True),
    "qwen2": Split(QWEN2_SPLIT, composed=True),
    "gpt-2": Split(),
    "default": Split(),
}
"""By the name in `tokenizer.ggml.pre`: the rules of the models' own tokenizers."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""GGUF's kinds of token."""


def read_file(path: Path) -> TokenizerSource:
    """Raises TokenizerError for a kind of tokenizer that is not rebuilt here, by its name."""
    return source_of(gguf_metadata(path))


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF file without that prefix (`ggml.tokens`, `chat_template`, ...)."""
    try:
        fields = read_gguf(path).fields
    except (ValueError, OSError) as error:
        raise TokenizerError(f"{path} is not a GGUF file that can be read: {error}") from error
    prefix = "tokenizer."
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def source_of(metadata: Mapping[str, Any]) -> TokenizerSource:
    """The tokenizer that a GGUF file's metadata describes (see `gguf_metadata`). Raises TokenizerError."""
    kind = metadata.get("ggml.model")
    tokens = metadata.get("ggml.tokens") or []
    kinds = metadata.get("ggml.token_type") or [NORMAL] * len(tokens)
    start = False
    if kind == "gpt2":
        split = _split_of(metadata)
        start = split.start
        backend = _byte_level(tokens, kinds, metadata.get("ggml.merges") or [], split)
    elif kind == "llama":
        start = True
        backend = _sentence_piece(tokens, kinds, metadata)
    else:
        raise TokenizerError(f"the GGUF file has a tokenizer of kind {kind!r}; served are 'gpt2' and 'llama'")
    _add_tokens(backend, tokens, kinds)
    ids = {
        name: metadata.get(f"ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding", "eot", "eom")
    }
    for name, token in ids.items():
        if token is not None:
            _known(token, len(tokens), f"the GGUF file's tokenizer.ggml.{name}_token_id")
    spelled = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    stops = frozenset(token for name in ("eos", "eot", "eom") if (token := ids[name]) is not None)
    return TokenizerSource(
        backend=backend,
        start=ids["bos"] if metadata.get("ggml.add_bos_token", start) else None,
        stops=stops | _spelled_stops(backend),
        template=metadata.get("chat_template"),
        names={name: tokens[token] for name, key in spelled.items() if (token := ids[key]) is not None},
    )


def _split_of(metadata: Mapping[str, Any]) -> Split:
    name = metadata.get("ggml.pre", "default")
    if name not in SPLITS:
        raise TokenizerError(f"the GGUF file splits text by the rule {name!r}; served are {', '.join(SPLITS)}")
    return SPLITS[name]


def _byte_level(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], split: Split
) -> tokenizers.Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if split.whole:
        # Else a control token's spelling would be "whole" in plain text. They come last in such files.
        vocabulary = {token: number for token, number in vocabulary.items() if kinds[number] != CONTROL}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split.whole))
    if split.composed:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    )
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    tokens: Sequence[str], kinds: Sequence[int], metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = metadata.get("ggml.scores") or []
    if len(scores) != len(tokens):
        raise TokenizerError(f"the GGUF file has {len(tokens)} tokens, and scores for {len(scores)} of them")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_of(tokens, kinds, scores),
            unk_token=next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def _merges_of(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose whole has the best score: so every way to cut a token in two
    is a merge, in the order of the scores. Only normal tokens are made and used by joining."""
    normal = {token: number for number, token in enumerate(tokens) if kinds[number] == NORMAL}
    cuts = [
        (-scores[number], len(token[:cut]), token[:cut], token[cut:])
        for token, number in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(left, right) for _, _, left, right in sorted(cuts, key=lambda cut: cut[:2])]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Control tokens are found only where they are parsed; user-defined ones are found in every text."""
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    defined = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
    numbers = {token: number for number, token in enumerate(tokens)}
    moved = [token for token in control + defined if backend.token_to_id(token) != numbers[token]]
    if moved:
        raise TokenizerError(f"the GGUF file's control tokens do not come last: {', '.join(moved[:3])}")


def _spelled_stops(backend: tokenizers.Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder().items()
    return frozenset(number for number, token in added if token.special and token.content in STOP_SPELLINGS)
