"""Hugging Face transformers as the referee of what a model says, and how to ask our engine the same."""

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.api import Draw, Row, Sampling
from engine.checkpoint import open_checkpoint
from engine.runner import TorchEngine, load_engine

BLOCK = 8
GREEDY = Sampling(temperature=0.0)


def referee(folder: Path, **options: Any) -> Any:
    """The reference model, in float32 unless told. One thread: the machine may be busy with other tests."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options))
    return model.eval()


@functools.cache
def referee_of_file(path: Path) -> Any:
    """The same of a GGUF file, kept: to read the default model takes a third of a minute."""
    return referee(path.parent, gguf_file=path.name)


def logits_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The reference's logits after every token, float32 [tokens, vocab], from one uncached forward pass."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()  # type: ignore[no-any-return]


def doubts(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """How far the reference prefers another token, in log probability, wherever it would not say `output`.

    Empty means that `output` is the reference's greedy text: each of its tokens is the likeliest after those
    before it.
    """
    logprobs = logits_of(model, [*prompt, *output])[len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(list(output))[:, None])[:, 0]
    return [float(gap) for gap in logprobs.max(-1).values - own if gap > 0]


def an_engine(folder: Path, *, dtype: str = "float32", pages: int = 512, block_tokens: int = BLOCK) -> TorchEngine:
    """Our engine for the same files, on one thread."""
    return load_engine(open_checkpoint(folder), dtype=dtype, pages=pages, block_tokens=block_tokens, threads=1)


def a_prompt(length: int, vocab: int = 512, seed: int = 0) -> list[int]:
    """Random tokens, always the same ones."""
    return random.Random(seed).choices(range(vocab), k=length)


async def prefill(
    engine: TorchEngine, prompt: Sequence[int], pages: Sequence[int], chunk: int, start: int = 0
) -> int:
    """Compute a prompt from `start` on in chunks; returns the first token of the greedy answer."""
    answer: list[list[Any]] = []
    for at in range(start, len(prompt), chunk):
        end = min(at + chunk, len(prompt))
        draws = [Draw(GREEDY, prompt, [])] if end == len(prompt) else []
        answer = await engine.step([Row(prompt[at:end], at, pages, draws)])
    return answer[0][0].token  # type: ignore[no-any-return]


async def decode(
    engine: TorchEngine,
    prompts: Sequence[Sequence[int]],
    firsts: Sequence[int],
    pages: Sequence[Sequence[int]],
    count: int,
) -> list[list[int]]:
    """Continue prefilled prompts, all in one batch, to `count` greedy tokens each, the first included."""
    outputs = [[first] for first in firsts]
    for said in range(1, count):
        rows = [
            Row(output[-1:], len(prompt) + said - 1, own, [Draw(GREEDY, prompt, output)])
            for prompt, output, own in zip(prompts, outputs, pages, strict=True)
        ]
        for output, drawn in zip(outputs, await engine.step(rows), strict=True):
            output.append(drawn[0].token)
    return outputs


async def answer(engine: TorchEngine, prompt: Sequence[int], count: int = 64, chunk: int = 1 << 20) -> list[int]:
    """Our greedy tokens after one prompt alone, from page 1 on."""
    pages = list(range(1, 2 + (len(prompt) + count) // engine.layout.block_tokens))
    first = await prefill(engine, prompt, pages, chunk)
    return (await decode(engine, [prompt], [first], [pages], count))[0]
