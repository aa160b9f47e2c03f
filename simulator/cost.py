"""What a pass, a step and a transfer take on a machine that is not here: derived from its datasheet, or fitted.

The derivations are those of the roofline: prefill is bound by arithmetic, decode by reading weights and KV. Each
is a polynomial with the terms that the Conductor's estimates have. The Conductor never sees these numbers: it
learns them from reports, as it does of real instances.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BF16_BYTES = 2


@dataclass(frozen=True)
class PassCost:
    """Seconds of one prefill pass over n tokens after p cached ones: base + token * n + pair * n * (p + n / 2)."""

    base_s: float
    token_s: float
    pair_s: float


@dataclass(frozen=True)
class StepCost:
    """Seconds of one decode step: base + row * rows + token * (tokens of context of all rows)."""

    base_s: float
    row_s: float
    token_s: float


@dataclass(frozen=True)
class CostModel:
    """One kind of instance: a model on a node."""

    name: str
    layers: int
    kv_bytes_token: int
    """Bytes of KV of one token, all layers."""
    prefill: PassCost
    step: StepCost
    host_bytes_s: float
    """Bytes a second between CPU memory and the devices of one instance, each way."""
    network_bytes_s: float
    """Bytes a second that one instance sends, and that it receives."""
    pages_tokens: int
    """Tokens whose KV fits on an instance beside the weights."""
    request_s: float = 0.0
    """What comes to every request before it is judged: HTTP, reading the body, the text's tokens."""
    speeds: tuple[float, ...] = ()
    """How fast each of 1, 2, ... instances is while they compute at once on one machine, against one alone. Where
    there are more than entries they share what the last entry has. Empty: each has a machine of its own."""

    def __post_init__(self) -> None:
        rates = (self.host_bytes_s, self.network_bytes_s)
        if min(self.layers, self.kv_bytes_token, self.pages_tokens, *rates) <= 0:
            raise ValueError(f"{self.name}: layers, kv_bytes_token, pages_tokens and rates must be above 0")
        costs = (*dataclasses.astuple(self.prefill), *dataclasses.astuple(self.step))
        if self.request_s < 0 or min(self.speeds, default=1) <= 0:
            raise ValueError(f"{self.name}: request_s is not negative, and speeds are above 0")
        if min(costs) < 0 or self.prefill.base_s + self.prefill.token_s <= 0 or self.step.base_s <= 0:
            raise ValueError(f"{self.name}: no cost is negative, and a pass and a step take time")

    def prefill_s(self, tokens: int, prefix: int) -> float:
        """One pass over `tokens` after a prefix of so many."""
        cost = self.prefill
        return cost.base_s + cost.token_s * tokens + cost.pair_s * tokens * (prefix + tokens / 2)

    def step_s(self, rows: float, context: float) -> float:
        """One step of so many rows with so many tokens of context in all."""
        return self.step.base_s + self.step.row_s * rows + self.step.token_s * context


@dataclass(frozen=True)
class Node:
    """A machine, by its datasheet. Rates a second, for the whole node."""

    devices: int
    flops: float
    """Dense, bf16."""
    hbm_bytes: float
    hbm_bytes_s: float
    host_bytes_s: float
    network_bytes_s: float
    link_bytes_s: float
    """Of one device to the others, one way."""


A800X8 = Node(
    devices=8,
    flops=8 * 312e12,
    hbm_bytes=8 * 80e9,
    hbm_bytes_s=8 * 2.0e12,
    host_bytes_s=128e9,
    network_bytes_s=800e9 / 8,
    link_bytes_s=200e9,
)
"""8 x A800-SXM-80GB: 312 TFLOP/s, 80 GB, 2.0 TB/s and NVLink of 400 GB/s both ways each; PCIe 4.0 x16 through four
switches; 800 Gbit/s of network. Datasheet values, as in the FAST 2025 paper of Mooncake."""


@dataclass(frozen=True)
class Shape:
    """A dense transformer with grouped-query attention and a gated feed-forward of three matrices."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """Of the feed-forward."""
    vocabulary: int

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    @property
    def layer_weights(self) -> int:
        """Of all layers: q and o, k and v, and the feed-forward's three. Norms are left out: a millionth."""
        return self.layers * (
            2 * self.width * self.width + 2 * self.width * self.kv_width + 3 * self.width * self.hidden
        )

    @property
    def weights(self) -> int:
        """Layers, embedding and output projection."""
        return self.layer_weights + 2 * self.vocabulary * self.width


LLAMA2_70B = Shape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672, vocabulary=32_000)
LLAMA3_70B = Shape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672, vocabulary=128_256)
"""As their published configurations say. They differ in nothing but the vocabulary: 69.0e9 and 70.6e9 weights."""

PREFILL_SHARE = 0.5
"""Of peak arithmetic in prefill: large matrix products reach 0.6 to 0.7; all-reduces over NVLink, which tensor
parallelism waits for twice a layer, take the rest."""

HBM_SHARE = 0.65
"""Of peak memory bandwidth in decode: reads of weights split over eight devices, and of KV in pages."""

LINK_SHARE = 0.6
"""Of NVLink's rate for an all-reduce of some MiB."""

HOST_SHARE = 0.8
"""Of PCIe's rate for copies from pinned memory in pieces of a layer of a block."""

NETWORK_SHARE = 0.87
"""Of the network's rate: the FAST 2025 paper measured 87 GB/s of 100 with its transfer engine."""

MEMORY_SHARE = 0.9
"""Of device memory that weights and KV may take; activations and the runtime keep the rest. vLLM's default."""

PASS_LAUNCH_S = 0.010
"""Of a prefill pass: launching the kernels of 80 layers, scheduling, sampling. A pass of fewer than about 120
tokens is bound by reading the weights (14 ms), not by arithmetic: there this line is up to 14 ms too low."""

STEP_LAUNCH_S = 0.009
"""Of a decode step beside its reads: launches (CUDA graphs), and the latency of 160 all-reduces of about 30 us."""

ROW_HOST_S = 20e-6
"""Of a decode step for each row: scheduling, sampling, detokenising on the CPU."""


def roofline(name: str, shape: Shape, node: Node) -> CostModel:
    """A cost model from first principles, all of the node in one tensor-parallel group.

    prefill   a weight costs 2 FLOP a token; a pair of a new token and one that it sees costs 4 * width a layer
              (2 for the score, 2 for the weighted sum). n new tokens after p make n * (p + n / 2) pairs.
    decode    every weight is read once a step, the KV of every token of context too. A row's arithmetic hides
              behind the reading of the weights while there are fewer than about 130 rows; its two all-reduces a
              layer do not: a ring moves 2 * (devices - 1) / devices of its activations over each link.
    """
    flops_s = node.flops * PREFILL_SHARE
    hbm_bytes_s = node.hbm_bytes_s * HBM_SHARE
    kv_bytes_token = shape.layers * 2 * shape.kv_width * BF16_BYTES
    weight_bytes = shape.weights * BF16_BYTES
    reduced_bytes = shape.layers * 2 * shape.width * BF16_BYTES * 2 * (node.devices - 1) / node.devices
    return CostModel(
        name=name,
        layers=shape.layers,
        kv_bytes_token=kv_bytes_token,
        prefill=PassCost(
            base_s=PASS_LAUNCH_S,
            token_s=2 * shape.layer_weights / flops_s,
            pair_s=4 * shape.width * shape.layers / flops_s,
        ),
        step=StepCost(
            base_s=STEP_LAUNCH_S + weight_bytes / hbm_bytes_s,
            row_s=ROW_HOST_S + reduced_bytes / (node.link_bytes_s * LINK_SHARE),
            token_s=kv_bytes_token / hbm_bytes_s,
        ),
        host_bytes_s=node.host_bytes_s * HOST_SHARE,
        network_bytes_s=node.network_bytes_s * NETWORK_SHARE,
        pages_tokens=int((node.hbm_bytes * MEMORY_SHARE - weight_bytes) / kv_bytes_token),
    )


MODELS = {
    model.name: model
    for model in (
        roofline("llama2-70b-a800", LLAMA2_70B, A800X8),
        roofline("llama3-70b-a800", LLAMA3_70B, A800X8),
    )
}
"""By name. Both: 320 KiB of KV a token; 12,000 tokens in 1.48 s; a step of 50 rows of 12,000 in 44 ms."""


class BadCostModel(ValueError):
    """No cost model of this name, or a file that is not one."""


def cost_model(name: str) -> CostModel:
    """By its name in MODELS, or from a JSON file of `body_of`'s shape. Raises BadCostModel, or OSError."""
    if name in MODELS:
        return MODELS[name]
    if not name.endswith(".json"):
        raise BadCostModel(f"no cost model {name!r}: there are {' and '.join(MODELS)}, or a .json file")
    return this_machine(Path(name))


def this_machine(path: Path) -> CostModel:
    """What a live run of a machine was fitted to. Raises BadCostModel, or OSError."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        parts = {"prefill": PassCost(**body["prefill"]), "step": StepCost(**body["step"])}
        return CostModel(**{**body, **parts, "speeds": tuple(body.get("speeds", ()))})
    except (ValueError, TypeError, KeyError) as error:
        raise BadCostModel(f"{path}: not a cost model: {error}") from error


def body_of(model: CostModel) -> dict[str, Any]:
    """JSON-ready, as `this_machine` reads it."""
    return dataclasses.asdict(model)
