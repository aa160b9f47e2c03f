"""Real prompts that every checkout has: passages of this project's own documents, each to be summed up."""

from pathlib import Path

from engine.chat_template import NoChatTemplate
from engine.tokenizer import Tokenizer
from protocol.settings import SettingsError

ROOT = Path(__file__).resolve().parent.parent

ASK = "Sum up this passage in a few sentences.\n\n"

TOKENS = (250, 400, 600, 800)
"""Lengths of passages, in turn."""


def passages(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """The tokens of so many prompts, no passage twice. Raises SettingsError if the documents have not enough
    text."""
    prompts: list[list[int]] = []
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]:
        ids, start = tokenizer.encode(path.read_text(encoding="utf-8"), special=False), 0
        while len(prompts) < count:
            tokens = TOKENS[len(prompts) % len(TOKENS)]
            if start + tokens > len(ids):
                break
            prompts.append(_prompt(tokenizer, tokenizer.decode(ids[start : start + tokens])))
            start += tokens
    if len(prompts) < count:
        raise SettingsError(f"the documents have text for {len(prompts)} prompts, not {count}")
    return prompts


def _prompt(tokenizer: Tokenizer, passage: str) -> list[int]:
    try:
        return tokenizer.chat([{"role": "user", "content": ASK + passage}])
    except NoChatTemplate:
        return tokenizer.encode(ASK + passage, special=False)
