"""What compressing the pool gains and what it costs: bytes, errors of KV, of logits and of text, and time.

    prompt ──prefill──> pages ──through a pool of each form──> pages ──> greedy text, and logits along one text
                          └───────────────untouched──────────────────> what all is compared with

KV goes through a real segment by the service's own mover. As in the service, the first token comes from before
that. Texts are decoded in equal batches, so that nothing else differs. Beside the forms stands KV that was never
stored either, but decoded without company: how far the rounding of bfloat16 alone carries a text.
"""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.objects import SMOLLM, Samples
from bench.passages import passages
from bench.physical import copy_s
from bench.report import Row, Spread
from bench.setup import Setup
from engine.api import Row as EngineRow
from engine.hosting import host_engine
from engine.paging import Pages, pages_for
from engine.runner import TorchEngine, TorchPass
from kvcache_pool.announcing import place_of
from kvcache_pool.api import Grant, Mover, Priority
from kvcache_pool.codec import Codec
from kvcache_pool.geometry import Geometry
from kvcache_pool.segment import Segment
from kvcache_pool.transfer.mover import Reach
from kvcache_pool.transfer.packed import mover_to
from protocol.blocks import COMPRESSIONS, BlockLayout
from protocol.ids import SegmentId
from protocol.instance import new_incarnation
from protocol.settings import SettingsError
from protocol.zmq_transport import ZmqTransport

ABOUT = "bytes, errors and text of KV that a pool compresses, against KV that never left its pages"

ANSWER = 64
BATCH = 12
"""Prompts decoded together."""

CHUNK = 512
OTHER, OTHER_STEP = "decoded alone", 4
"""Each prompt is a batch of its own there, and its logits come from so many tokens at once."""

HOST = "here"
ROUNDS = 10
OBJECT_BLOCKS = 32
"""Packed in one go where time is measured: 512 tokens of SmolLM2, 11.8 MB."""

Scores = npt.NDArray[np.float32]


class Prompt(NamedTuple):
    """One prompt whose KV lies in these pages."""

    tokens: list[int]
    pages: list[int]


@dataclass
class Figures:
    """What was found of one form, prompt by prompt."""

    key_mean: list[float] = field(default_factory=list)
    key_max: list[float] = field(default_factory=list)
    value_mean: list[float] = field(default_factory=list)
    value_max: list[float] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    """Mean difference of a logit, without its sign, over all tokens of the vocabulary and ANSWER positions."""
    divergence: list[float] = field(default_factory=list)
    """Kullback-Leibler divergence from the true next-token distribution, mean over the same, in nats."""
    common: list[int] = field(default_factory=list)
    """Tokens of the text before the first that is another."""

    def note_kv(self, exact: torch.Tensor, other: torch.Tensor) -> None:
        """Of one prompt, [layers, 2, tokens, kv_heads, head_dim]."""
        off = (other.float() - exact.float()).abs()
        self.key_mean.append(off[:, 0].mean().item())
        self.key_max.append(off[:, 0].max().item())
        self.value_mean.append(off[:, 1].mean().item())
        self.value_max.append(off[:, 1].max().item())

    def note_scores(self, true: Scores, other: Scores) -> None:
        """Of one prompt, [positions, vocab]."""
        ours, theirs = torch.from_numpy(true).log_softmax(-1), torch.from_numpy(other).log_softmax(-1)
        self.logits.append(float(np.abs(true - other).mean()))
        self.divergence.append((ours.exp() * (ours - theirs)).sum(-1).mean().item())

    def rows(self, form: str) -> list[Row]:
        """As reported; without compression every text must be the same."""
        differing = sum(common < ANSWER for common in self.common)
        count = len(self.common)
        return [
            Row(f"{form}: error of keys, mean", "", Spread.of(self.key_mean)),
            Row(f"{form}: error of keys, greatest", "", Spread.of(self.key_max)),
            Row(f"{form}: error of values, mean", "", Spread.of(self.value_mean)),
            Row(f"{form}: error of values, greatest", "", Spread.of(self.value_max)),
            Row(f"{form}: difference of logits, mean", "", Spread.of(self.logits)),
            Row(f"{form}: divergence of the next token", "nats", Spread.of(self.divergence)),
            Row(f"{form}: same tokens of {ANSWER}, mean", "tokens", Spread.of([sum(self.common) / count])),
            Row(
                f"{form}: texts that differ, of {count}",
                "",
                Spread.of([float(differing)]),
                limit=0 if form == "none" else None,
            ),
        ]


async def run(setup: Setup, count: int) -> list[Row]:
    """Measure with so many prompts. Raises as open_model and host_engine do, and SettingsError for too many."""
    model = setup.open()
    prompts = passages(model.tokenizer, count)
    engine = await host_engine(model, setup.prefill())
    assert isinstance(engine, TorchEngine)
    figures = {form: Figures() for form in (*COMPRESSIONS, OTHER)}
    try:
        for start in range(0, count, BATCH):
            await _batch(engine, prompts[start : start + BATCH], figures)
    finally:
        engine.close()
    lengths = Spread.of([float(len(prompt)) for prompt in prompts])
    rows = [Row("tokens of a prompt", "tokens", lengths), *_sizes(engine.layout)]
    for form, found in figures.items():
        rows += found.rows(form)
    return rows + await _times(setup.runs)


async def _batch(engine: TorchEngine, prompts: Sequence[list[int]], figures: dict[str, Figures]) -> None:
    """Add what is found of these prompts. Their pages are the engine's first, and free afterwards."""
    free, block = Pages(engine.pages), engine.layout.block_tokens
    own = [free.take(pages_for(len(prompt) + ANSWER, block)) for prompt in prompts]
    batch = [Prompt(tokens, pages) for tokens, pages in zip(prompts, own, strict=True) if pages is not None]
    if len(batch) < len(prompts):
        raise SettingsError(f"{len(prompts)} prompts do not fit in {engine.pages} pages")
    firsts = [await _prefill(engine, prompt) for prompt in batch]
    exact = [_kv(engine, prompt) for prompt in batch]
    texts = await _decoded(engine, batch, firsts, BATCH)
    scores = [await _scores(engine, prompt, text, ANSWER) for prompt, text in zip(batch, texts, strict=True)]
    for form, found in figures.items():
        for prompt, kv in zip(batch, exact, strict=True):
            _restore(engine, prompt, kv)
        size, step = (BATCH, ANSWER) if form != OTHER else (1, OTHER_STEP)
        if form != OTHER:
            await _through_a_pool(engine, batch, form)
        for prompt, kv in zip(batch, exact, strict=True):
            found.note_kv(kv, _kv(engine, prompt))
        for text, other in zip(texts, await _decoded(engine, batch, firsts, size), strict=True):
            pairs = zip(text, other, strict=True)
            found.common.append(next((n for n, (one, two) in enumerate(pairs) if one != two), ANSWER))
        for prompt, text, true in zip(batch, texts, scores, strict=True):
            found.note_scores(true, await _scores(engine, prompt, text, step))


async def _prefill(engine: TorchEngine, prompt: Prompt) -> int:
    """Compute its KV; returns the likeliest first token."""
    scores = np.empty((0, 0), np.float32)
    for start in range(0, len(prompt.tokens), CHUNK):
        row = EngineRow(prompt.tokens[start : start + CHUNK], start, prompt.pages)
        scores = await engine.in_thread(TorchPass(engine, [row]).logits_of_all)
    return int(scores[-1].argmax())


async def _decoded(
    engine: TorchEngine, prompts: Sequence[Prompt], firsts: Sequence[int], size: int
) -> list[list[int]]:
    """ANSWER greedy tokens of each, the first included; `size` prompts in a batch."""
    texts = [[first] for first in firsts]
    for start in range(0, len(prompts), size):
        batch = [*zip(prompts, texts, strict=True)][start : start + size]
        for said in range(ANSWER - 1):
            rows = [EngineRow(text[-1:], len(prompt.tokens) + said, prompt.pages) for prompt, text in batch]
            scores = await engine.in_thread(TorchPass(engine, rows).logits_of_all)
            for (_, text), likeliest in zip(batch, scores.argmax(1), strict=True):
                text.append(int(likeliest))
    return texts


async def _scores(engine: TorchEngine, prompt: Prompt, text: list[int], step: int) -> Scores:
    """Logits after each token of this text, [ANSWER, vocab], computed `step` tokens at once."""
    scores = []
    for start in range(0, len(text), step):
        row = EngineRow(text[start : start + step], len(prompt.tokens) + start, prompt.pages)
        scores.append(await engine.in_thread(TorchPass(engine, [row]).logits_of_all))
    return np.concatenate(scores)


# -- KV -----------------------------------------------------------------------------------------------


def _kv(engine: TorchEngine, prompt: Prompt) -> torch.Tensor:
    """A copy of a prompt's KV, [layers, 2, tokens, kv_heads, head_dim]."""
    paged = engine.cache[:, prompt.pages].transpose(1, 2)
    return paged.flatten(2, 3)[:, :, : len(prompt.tokens)].clone()


def _restore(engine: TorchEngine, prompt: Prompt, kv: torch.Tensor) -> None:
    step = engine.layout.block_tokens
    for number, page in enumerate(prompt.pages):
        part = kv[:, :, number * step : (number + 1) * step]
        engine.cache[:, page, :, : part.shape[2]] = part


async def _through_a_pool(engine: TorchEngine, batch: Sequence[Prompt], form: str) -> None:
    """Store the KV of all prompts, forget it, and load it again."""
    layout, step = replace(engine.layout, compression=form), engine.layout.block_tokens
    used = [prompt.pages[: pages_for(len(prompt.tokens), step)] for prompt in batch]
    async with _a_mover(layout, sum(map(len, used))) as (mover, grants):
        start = 0
        for prompt, pages in zip(batch, used, strict=True):
            mine = grants[start : start + len(pages)]
            start += len(pages)
            filled = len(prompt.tokens) - (len(pages) - 1) * step
            for layer in range(layout.layers):
                runs = engine.runs(layer)
                await mover.write(layer, mine, runs, pages, Priority.STORE, filled)
                runs[pages] = 0
                good = await mover.read(layer, mine, runs, pages, Priority.LOAD)
                assert good == len(pages), "memory of this process is as it was written"


@asynccontextmanager
async def _a_mover(layout: BlockLayout, slots: int) -> AsyncIterator[tuple[Mover, list[Grant]]]:
    """A mover to a segment of its own, and grants of all its slots."""
    async with AsyncExitStack() as stack:
        transport = ZmqTransport()
        stack.callback(transport.close)
        segment = Segment(SegmentId("bench"), new_incarnation(), Geometry(layout, slots))
        stack.callback(segment.close)
        mover = mover_to(transport, HOST, Reach.SHM, layout)
        stack.push_async_callback(mover.aclose)
        mover.know([place_of(segment, "", HOST)])
        yield mover, [Grant(segment.segment, slot, 1) for slot in range(slots)]


# -- bytes and time -----------------------------------------------------------------------------------


def _sizes(plain: BlockLayout) -> list[Row]:
    without = Spread.of([float(plain.block_bytes)])
    packed = {form: replace(plain, compression=form) for form in COMPRESSIONS}
    return [
        Row(f"{form}: bytes of a block", "bytes", Spread.of([float(layout.block_bytes)]), without)
        for form, layout in packed.items()
        if form != "none"
    ]


async def _times(runs: int) -> list[Row]:
    """Packing and unpacking SmolLM2's KV in one thread, against copying as many plain bytes."""
    samples, rows = Samples(), []
    size = math.prod((OBJECT_BLOCKS, SMOLLM.layers)), SMOLLM.run_bytes
    values = torch.randn(size[0], size[1] // 2).bfloat16()
    plain = values.view(torch.uint8).numpy()
    back = np.empty_like(plain)
    for form in ("int8", "fp8"):
        layout = replace(SMOLLM, compression=form)
        codec, packed = Codec(layout), np.empty((len(plain), layout.run_bytes), np.uint8)

        async def copy(_: int) -> None:
            copy_s(back, plain)

        async def pack(_: int, codec: Codec = codec, packed: npt.NDArray[np.uint8] = packed) -> None:
            codec.pack(plain, packed)

        async def unpack(_: int, codec: Codec = codec, packed: npt.NDArray[np.uint8] = packed) -> None:
            codec.unpack(packed, back)

        names = f"{form} copy", f"{form} pack", f"{form} unpack"
        for _ in range(runs):
            await samples.turns(ROUNDS, dict(zip(names, (copy, pack, unpack), strict=True)))
        what = f"{plain.nbytes / 1e6:.1f} MB, against memcpy"
        rows.append(samples.row(f"{form}: packing {what}", names[1], names[0]))
        rows.append(samples.row(f"{form}: unpacking {what}", names[2], names[0]))
    return rows
