"""An engine that answers from a cost model: time passes as if a model had computed.

exact      kv(layer, t) = H(layer, kv(layer, t - 1), token t); the next token is drawn from it, so one wrong
           byte of KV changes the text, and the right text can be foretold from the prompt
otherwise  every token is FILL, and the answer ends after as many tokens as its seed says
"""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from engine.api import Row, Sampled
from engine.ending import end_of
from protocol.blocks import BlockLayout
from simulator.cores import Cores
from simulator.cost import CostModel
from simulator.mover import PRINT_BYTES

END = 1
"""The token that ends an answer: put it among a sampling's stop tokens."""

FILL = Sampled(2)
LAST = Sampled(END)
VOCAB = 50_000


class CostEngine:
    """An engine.api.Engine."""

    def __init__(
        self,
        cost: CostModel,
        layout: BlockLayout,
        pages: int,
        context: int,
        *,
        exact: bool = False,
        cores: Cores | None = None,
    ) -> None:
        self.layout = layout
        self.pages = pages
        self.context_tokens = context
        self.cost = cost
        self.exact = exact
        self.cores = cores or Cores()
        self.computed_s = 0.0
        """Seconds of passes since the start; of those that shared cores, as if alone."""
        self._kv = np.zeros((layout.layers, pages, PRINT_BYTES), np.uint8)

    def begin(self, rows: Sequence[Row]) -> "CostPass":
        """See Engine."""
        return CostPass(self, rows, self._pass_s(rows))

    async def step(self, rows: Sequence[Row]) -> list[list[Sampled]]:
        """See Engine."""
        seconds = self._step_s(rows)
        await self.cores.compute(seconds)
        self.computed_s += seconds
        return self._compute(rows)

    async def run(self, rows: Sequence[Row], steps: int, enough: asyncio.Event) -> list[list[Sampled]]:
        """See Engine. The steps' times are a sum in closed form, so many steps cost one wait; not where others
        compute beside them."""
        if self.exact or self.cores.shared:
            return await self._run_exactly(rows, steps if self.exact else 1, enough)
        left = [_left(row) for row in rows]
        steps = min(steps, *left)
        clock = asyncio.get_running_loop().time
        batch, context = len(rows), sum(row.start for row in rows) + len(rows)
        began = clock()
        try:
            async with asyncio.timeout(self._steps_s(batch, context, steps)):
                await enough.wait()
        except TimeoutError:
            pass
        else:
            steps = self._steps_in(batch, context, clock() - began, steps)
            await asyncio.sleep(max(began + self._steps_s(batch, context, steps) - clock(), 0.0))
        self.computed_s += clock() - began
        goes_on, ends = [FILL] * steps, [*[FILL] * (steps - 1), LAST]
        return [ends if tokens == steps else goes_on for tokens in left]

    async def _run_exactly(self, rows: Sequence[Row], steps: int, enough: asyncio.Event) -> list[list[Sampled]]:
        said: list[list[Sampled]] = [[] for _ in rows]
        outputs = [list(row.draws[0].output) for row in rows]
        for step in range(steps):
            following = [
                Row([said[i][-1].token], row.start + step, row.pages, row.draws) if step else row
                for i, row in enumerate(rows)
            ]
            for mine, output, drawn in zip(said, outputs, await self.step(following), strict=True):
                mine.append(drawn[0])
                output.append(drawn[0].token)
            over = any(end_of(row.draws[0].sampling, out) for row, out in zip(rows, outputs, strict=True))
            if over or enough.is_set():
                break
        return said

    def runs(self, layer: int) -> npt.NDArray[np.uint8]:
        """Fingerprints of one layer's pages, [pages, PRINT_BYTES]."""
        view: npt.NDArray[np.uint8] = self._kv[layer]
        return view

    def block(self, page: int) -> npt.NDArray[np.uint8]:
        """Fingerprints of all layers of one page, [layers, PRINT_BYTES]."""
        view: npt.NDArray[np.uint8] = self._kv[:, page]
        return view

    def close(self) -> None:
        """There is no thread."""

    # -- time -------------------------------------------------------------------------------------

    def _pass_s(self, rows: Sequence[Row]) -> float:
        return sum(self.cost.prefill_s(len(row.tokens), row.start) for row in rows)

    def _step_s(self, rows: Sequence[Row]) -> float:
        """A batch, which may be empty, and beside it a pass for each row that computes several tokens. That is an
        upper bound: a real engine reads the weights once for both."""
        plain = [row for row in rows if len(row.tokens) == 1]
        more = sum(self.cost.prefill_s(len(row.tokens), row.start) for row in rows if len(row.tokens) > 1)
        context = sum(row.start + 1 for row in plain)
        return self.cost.step_s(len(plain), context) + more

    def _steps_s(self, batch: int, context: int, steps: int) -> float:
        """So many steps of a batch whose context grows by one token a row and step."""
        growth = self.cost.step.token_s * batch * steps * (steps - 1) / 2
        return steps * self.cost.step_s(batch, context) + growth

    def _steps_in(self, batch: int, context: int, seconds: float, most: int) -> int:
        """How many steps have begun after so many seconds: those are finished."""
        first, growth = self.cost.step_s(batch, context), self.cost.step.token_s * batch
        guess = seconds / first
        if growth:
            half = first - growth / 2
            guess = (math.sqrt(half * half + 2 * growth * seconds) - half) / growth
        return min(max(math.ceil(guess - 1e-9), 1), most)

    # -- KV ---------------------------------------------------------------------------------------

    def _compute(self, rows: Sequence[Row]) -> list[list[Sampled]]:
        if self.exact:
            for layer in range(self.layout.layers):
                for row in rows:
                    self.advance(layer, row)
        return [[self.drawn(row) for _ in row.draws] for row in rows]

    def advance(self, layer: int, row: Row) -> None:
        """Compute one layer of a row: the chain of its fingerprints goes on."""
        block = self.layout.block_tokens
        state = self._kv[layer, row.pages[(row.start - 1) // block]].tobytes() if row.start else b""
        for position, token in enumerate(row.tokens, row.start):
            state = follow(layer, state, token)
            if (position + 1) % block == 0 or position + 1 == row.start + len(row.tokens):
                self._kv[layer, row.pages[position // block]] = np.frombuffer(state, np.uint8)

    def drawn(self, row: Row) -> Sampled:
        """The token after a row."""
        if not self.exact:
            return LAST if _left(row) <= 1 else FILL
        page = row.pages[(row.start + len(row.tokens) - 1) // self.layout.block_tokens]
        return Sampled(draw([self._kv[layer, page].tobytes() for layer in range(self.layout.layers)]))


class CostPass:
    """An engine.api.Pass whose layers take equal times."""

    def __init__(self, engine: CostEngine, rows: Sequence[Row], seconds: float) -> None:
        self._engine = engine
        self._rows = rows
        self._layer_s = seconds / engine.layout.layers

    async def layer(self, layer: int) -> None:
        """See Pass."""
        await self._engine.cores.compute(self._layer_s)
        self._engine.computed_s += self._layer_s
        if self._engine.exact:
            for row in self._rows:
                self._engine.advance(layer, row)

    async def finish(self) -> list[list[Sampled]]:
        """See Pass."""
        return [[self._engine.drawn(row) for _ in row.draws] for row in self._rows]


def _left(row: Row) -> int:
    """Tokens until the answer ends, the next included: its seed is its length."""
    draw = row.draws[0]
    return max(draw.sampling.seed - len(draw.output), 1)


def follow(layer: int, before: bytes, token: int) -> bytes:
    """The fingerprint of a layer's KV after one more token."""
    return xxhash.xxh3_64_digest(before + token.to_bytes(4, "little"), seed=layer)


def draw(prints: Sequence[bytes]) -> int:
    """The next token, from all layers' KV; never END."""
    return 3 + xxhash.xxh3_64_intdigest(b"".join(prints)) % VOCAB


def foreseen(tokens: Sequence[int], block_tokens: int, layers: int) -> list[list[bytes]]:
    """What an exact engine's memory holds for each full block of `tokens`: a fingerprint for each layer."""
    states, blocks = [b""] * layers, []
    for position, token in enumerate(tokens, 1):
        states = [follow(layer, state, token) for layer, state in enumerate(states)]
        if position % block_tokens == 0:
            blocks.append(states)
    return blocks


def foretell(prompt: Sequence[int], count: int, layers: int) -> list[int]:
    """The first `count` tokens of the answer to `prompt`, from an exact engine."""
    states = [b""] * layers
    for token in prompt:
        states = [follow(layer, state, token) for layer, state in enumerate(states)]
    answer: list[int] = []
    for _ in range(count):
        answer.append(draw(states))
        states = [follow(layer, state, answer[-1]) for layer, state in enumerate(states)]
    return answer
