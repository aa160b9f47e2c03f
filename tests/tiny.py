"""Tiny random models on disk, as a Hugging Face folder: for tests that need a real model but no real text."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""As in Llama 3.1, with a short original context, so that all three of its regions are met."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = [
    "A block is a run of consecutive tokens, named by a hash that depends on all tokens before it.",
    "The prefill instance loads the prefix layer by layer and computes only what is missing.",
    "The decode instance joins the request to its running batch and streams the tokens back.",
    "Three dumplings on one skewer: the first is sweet, the second is salty, the third is gone.",
    "def place(view, ask, found, now):\n    return min(view.instances, key=lambda i: i.queued_s + ask.cost(i))\n",
    "How long is the river? 1 234 kilometres, give or take 56. Who says so? Nobody; they measured it.",
    "Größe, naïveté, 東京, Привет, שלום, مرحبا, 👋🏽: text is more than the letters of one alphabet.",
    "system user assistant tool: a conversation is a list of turns, each with a role and some content.",
]


def tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of `family` and its tokenizer into `folder`; returns `folder`.

    3 layers, hidden size 96, 6 query and 2 KV heads of 16, vocabulary 512, context 2048, float32. `overrides`
    replace fields of the Hugging Face configuration, for example `tie_word_embeddings=True`. Equal arguments
    give equal weights.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": SPECIAL.index("<|endoftext|>"),
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
    }
    config = transformers.AutoConfig.for_model(family, **(settings | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, seed)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of exactly VOCAB tokens, trained on CORPUS: always the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB, "the corpus is too small for the vocabulary"
    return tokenizer


def _fill(model: torch.nn.Module, seed: int) -> None:
    """Weights so large that greedy text wanders and its choices are clear; biases and norms away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.normal_(0.0, 0.2, generator=generator)
            if "norm" in name:
                weight.add_(1.0)


def _write_tokenizer(folder: Path) -> None:
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
