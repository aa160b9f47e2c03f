"""Tokenizers rebuilt from GGUF files and Hugging Face folders equal the reference's, or are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors

from engine.tokenizer import TokenizerError, open_tokenizer
from engine.tokenizer_source import source_of
from tests.tiny import CHAT_TEMPLATE, SPECIAL, tiny_tokenizer

RECORDED = json.loads((Path(__file__).parent / "data" / "default_model_ids.json").read_text())
TEXTS = [entry["text"] for entry in RECORDED["strings"]]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


# --- GGUF files --------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: str, tokens: list[str], kinds: list[int], **more: Any) -> Path:
    """A GGUF file of a tokenizer and nothing else. Keys in `more` are those after `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in more.items():
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, pre: str, **more: Any) -> Path:
    """The tiny vocabulary, its control tokens moved to the end, split by the rule `pre`."""
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = tokens[len(SPECIAL) :] + SPECIAL
    kinds = [1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL)
    merges = [" ".join(pair) for pair in model["merges"]]
    return write_gguf(
        path, "gpt2", tokens, kinds, pre=pre, merges=merges, bos_token_id=509, eos_token_id=511, **more
    )


def of_transformers(path: Path) -> tokenizers.Tokenizer:
    integration = pytest.importorskip("transformers.integrations.gguf")
    architecture, parts, _ = integration.get_gguf_tokenizer(str(path))
    backend: tokenizers.Tokenizer = integration.convert_gguf_tokenizer(architecture, parts)[0]
    return backend


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "default"])
def test_rules_for_splitting_equal_the_references(tmp_path: Path, pre: str):
    path = byte_level_gguf(tmp_path / "a.gguf", pre, add_bos_token=False)
    ours, reference = open_tokenizer(path), of_transformers(path)
    if pre == "qwen2":  # the models' own files compose; the reference's reading of GGUF forgets it
        reference.normalizer = normalizers.NFC()
    if pre == "llama-bpe":  # and likewise take whole words first
        reference.model.ignore_merges = True
    for text in TEXTS:
        assert ours.encode(text, special=True) == reference.encode(text, add_special_tokens=False).ids


def test_qwen_composes_and_llama_adds_its_start(tmp_path: Path):
    qwen = open_tokenizer(byte_level_gguf(tmp_path / "q.gguf", "qwen2"))
    assert qwen.encode("e\u0301", special=False) == qwen.encode("\u00e9", special=False)
    llama = open_tokenizer(byte_level_gguf(tmp_path / "l.gguf", "llama-bpe"))
    assert llama.encode("a", special=False)[0] == 509
    assert llama.encode("<|endoftext|>a", special=True) == llama.encode("a", special=True)
    assert llama.encode("<|endoftext|>a", special=False).count(509) == 1


def test_unknown_kinds_and_rules_are_refused_by_name(tmp_path: Path):
    with pytest.raises(TokenizerError, match="'tekken'"):
        open_tokenizer(byte_level_gguf(tmp_path / "a.gguf", "tekken"))
    with pytest.raises(TokenizerError, match="'bert'"):
        source_of({"ggml.model": "bert", "ggml.tokens": ["a"]})
    with pytest.raises(TokenizerError, match="scores for 0"):
        source_of({"ggml.model": "llama", "ggml.tokens": ["a"]})
    with pytest.raises(TokenizerError, match="do not come last"):
        source_of(
            {"ggml.model": "gpt2", "ggml.pre": "llama-bpe", "ggml.tokens": ["<s>", "a"], "ggml.token_type": [3, 1]}
        )
    (tmp_path / "b.gguf").write_bytes(b"GGUX" + bytes(60))
    with pytest.raises(TokenizerError, match="not a GGUF file"):
        open_tokenizer(tmp_path / "b.gguf")
    with pytest.raises(TokenizerError, match="neither"):
        open_tokenizer(tmp_path / "c.txt")


WORDS = ["▁", "a", "b", "s", "<", ">", "/", "▁a", "ab", "▁ab", "<s", "s>", "aab", "é"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
KINDS = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]
SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(WORDS))]


def test_sentence_piece_equals_the_reference(tmp_path: Path):
    more = {"scores": SCORES, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    path = write_gguf(tmp_path / "a.gguf", "llama", PIECES, KINDS, **more)
    ours, reference = open_tokenizer(path), of_transformers(path)
    for text in ["", "a", "ab aab", "  ab  ", "é東\n", "ab<s>ab</s> ab", *TEXTS]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special=True) == (ids if ids[:1] == [1] else [1, *ids])
    literal = [PIECES.index(piece) for piece in ("▁a", "<s", ">")]  # no merge makes a control token
    assert ours.encode("a<s>", special=False) == [1, *literal]
    assert ours.decode(ours.encode("<s>東 é", special=False)[1:]) == " <s>東 é"
    assert [ours.token_bytes(token) for token in (3 + 0xE6, PIECES.index("▁ab"))] == [b"\xe6", b" ab"]


@pytest.mark.parametrize("last", ["</s>", ""])
def test_only_the_first_text_gets_the_prefix_space(tmp_path: Path, last: str):
    more = {"scores": SCORES, "bos_token_id": 1, "chat_template": "<s>{{ messages[0].content }}" + last}
    tokenizer = open_tokenizer(write_gguf(tmp_path / "a.gguf", "llama", PIECES, KINDS, **more))
    ids = tokenizer.chat([user("ab<")])  # ends like a control token begins: the long way round
    assert ids == tokenizer.encode("<s>ab<" + last, special=True)
    assert tokenizer.decode(ids) == "<s>ab<" + last


# --- folders -----------------------------------------------------------------------------------------------------


def a_folder(folder: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
    """A Hugging Face folder without weights; `files` by name, `chat_template` as text, the others as JSON."""
    (backend or tiny_tokenizer()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if name == "chat_template":
            (folder / "chat_template.jinja").write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_and_a_file_of_one_model_agree(tmp_path: Path):
    backend = tiny_tokenizer()
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    settings = {"eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    folder = open_tokenizer(a_folder(tmp_path, backend, tokenizer_config=settings, chat_template=CHAT_TEMPLATE))
    more = {"pre": "smollm", "merges": merges, "eos_token_id": 2, "chat_template": CHAT_TEMPLATE}
    file = open_tokenizer(
        write_gguf(tmp_path / "a.gguf", "gpt2", tokens, [3] * 3 + [1] * (len(tokens) - 3), **more)
    )
    for text in TEXTS:
        assert folder.encode(text, special=True) == file.encode(text, special=True)
    assert folder.chat([user("a<|im_end|>")]) == file.chat([user("a<|im_end|>")])
    assert folder.stop_tokens == file.stop_tokens == {0, 2}
    assert folder.digest() == file.digest()


def test_stop_tokens_come_from_every_file(tmp_path: Path):
    folder = a_folder(tmp_path, generation_config={"eos_token_id": [7, 8]}, config={"eos_token_id": 9})
    assert open_tokenizer(folder).stop_tokens == {0, 2, 7, 8, 9}


def test_the_start_token_of_a_folder(tmp_path: Path):
    backend = tiny_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert open_tokenizer(a_folder(tmp_path, backend)).encode("a", special=False)[0] == 1
    config: dict[str, Any] = {"add_bos_token": False}
    assert open_tokenizer(a_folder(tmp_path, backend, tokenizer_config=config)).encode("", special=False) == []
    config = {"add_bos_token": True, "bos_token": "<|endoftext|>"}
    assert open_tokenizer(a_folder(tmp_path, backend, tokenizer_config=config)).encode("", special=False) == [0]


def test_templates_of_a_folder(tmp_path: Path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "a"}]
    tokenizer = open_tokenizer(a_folder(tmp_path, tokenizer_config={"chat_template": named}))
    assert tokenizer.decode(tokenizer.chat([])) == "a"
    tokenizer = open_tokenizer(a_folder(tmp_path, chat_template="b"))
    assert tokenizer.decode(tokenizer.chat([])) == "b"


def test_unreadable_folders_are_refused(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        open_tokenizer(tmp_path)
    a_folder(tmp_path, config=[])
    with pytest.raises(TokenizerError, match="JSON object"):
        open_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not JSON"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("eos", "reason"), [(512, "is 512, outside the vocabulary of 512"), ("2", "not '2'")])
@pytest.mark.parametrize("listed", [False, True])
def test_an_end_token_that_is_none_is_refused_by_name(
    tmp_path: Path, name: str, eos: Any, reason: str, listed: bool
):
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [2, eos] if listed else eos}))
    with pytest.raises(TokenizerError, match=f"{name}: eos_token_id .*{reason}"):
        open_tokenizer(tmp_path)


def test_an_end_token_of_a_padded_vocabulary_is_one(tmp_path: Path):
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 515, "vocab_size": 520}))
    assert 515 in open_tokenizer(tmp_path).stop_tokens


def test_an_end_token_outside_a_files_vocabulary_is_refused_by_name(tmp_path: Path):
    path = byte_level_gguf(tmp_path / "a.gguf", "gpt-2", eot_token_id=512)
    with pytest.raises(TokenizerError, match=r"eot_token_id is 512, outside the vocabulary of 512"):
        open_tokenizer(path)
