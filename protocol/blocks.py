"""Blocks: how they are named and how their bytes lie. The same in every process, or caches would be poisoned.

A block is `block_tokens` consecutive tokens' KV over all layers:

    [layers, 2, block_tokens, kv_heads, head_dim]     contiguous; 2 = keys, values
     └────── one run ─────────────────────────┘       one layer of one block: the grain of layer-wise transfer

Its name is a SHA-256 chain over length-framed fields, so that equal names mean equal tokens *and* equal
everything that the KV depends on: model, tokenizer, layout, tenant, salt.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocol.ids import BlockHash, token_ids
from protocol.message import Message

FORMAT_VERSION = 1
"""Raised when the meaning of a block's bytes changes; old blocks then simply are never found."""

KV_TYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

COMPRESSIONS = ("none", "int8", "fp8")
"""How a pool may hold KV: as it is, or as one byte an element, with scales (`kvcache_pool/codec.py`)."""


class BlockLayout(Message):
    """The shape of a block; `kv_type` is one of KV_TYPE_BYTES, `compression` one of COMPRESSIONS."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    kv_type: str
    compression: str = "none"

    def __post_init__(self) -> None:
        if self.kv_type not in KV_TYPE_BYTES:
            raise ValueError(f"kv_type must be one of {sorted(KV_TYPE_BYTES)}, not {self.kv_type!r}")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, not {self.compression!r}")
        if min(self.layers, self.kv_heads, self.head_dim, self.block_tokens) < 1:
            raise ValueError(f"every extent of a block must be positive: {self}")

    @property
    def run_bytes(self) -> int:
        """Bytes of one layer of one block, in the form that the pool holds."""
        elements = 2 * self.block_tokens * self.kv_heads * self.head_dim
        if self.compression == "none":
            return elements * KV_TYPE_BYTES[self.kv_type]
        return elements + self.scales * KV_TYPE_BYTES[self.kv_type]

    @property
    def scales(self) -> int:
        """Numbers of `kv_type` beside the elements of a compressed run: two for each channel of its keys, one for
        each token and head of its values."""
        return (2 * self.head_dim + self.block_tokens) * self.kv_heads

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.run_bytes

    @property
    def plain(self) -> "BlockLayout":
        """The same blocks as engines hold them, not compressed."""
        return replace(self, compression="none")

    @property
    def kv_form(self) -> str:
        """How elements are held, in one word: `bfloat16`, or `bfloat16+int8`. See `of_form`."""
        return self.kv_type if self.compression == "none" else f"{self.kv_type}+{self.compression}"

    @staticmethod
    def of_form(kv_form: str, layers: int, kv_heads: int, head_dim: int, block_tokens: int) -> "BlockLayout":
        """The layout of these extents and this `kv_form`. Raises ValueError."""
        kv_type, _, compression = kv_form.partition("+")
        return BlockLayout(layers, kv_heads, head_dim, block_tokens, kv_type, compression or "none")


@dataclass(frozen=True)
class HashRoot:
    """What a chain of block names starts from: all that the KV depends on besides the tokens."""

    model_digest: str
    tokenizer_digest: str
    layout: BlockLayout
    tenant: str = ""
    salt: str = ""

    def digest(self) -> bytes:
        """32 bytes; a fixed function of the fields, whatever the process."""
        layout = self.layout
        shape = (layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens)
        return _hash(
            b"dango-block-root",
            struct.pack("<I4I", FORMAT_VERSION, *shape),
            layout.kv_form.encode(),
            self.model_digest.encode(),
            self.tokenizer_digest.encode(),
            self.tenant.encode(),
            self.salt.encode(),
        )


def block_hashes(root: HashRoot, tokens: Sequence[int]) -> list[BlockHash]:
    """The names of the full blocks of `tokens`, in order; the tail after the last full block has none."""
    return _chain(root.digest(), root.layout.block_tokens, tokens)


def extend_hashes(root: HashRoot, known: Sequence[BlockHash], tokens: Sequence[int]) -> list[BlockHash]:
    """The names of the full blocks of `tokens`, of which the first `len(known)` are known already."""
    step = root.layout.block_tokens
    parent = known[-1] if known else root.digest()
    return [*known, *_chain(parent, step, tokens[len(known) * step :])]


def _chain(parent: bytes, step: int, tokens: Sequence[int]) -> list[BlockHash]:
    """The names of the full blocks of `tokens` after the block named `parent`. `Ids` are read where they lie."""
    names: list[BlockHash] = []
    if len(tokens) < step:
        return names
    ids = memoryview(tokens if isinstance(tokens, array) else token_ids(tokens)).cast("B")
    for end in range(step, len(tokens) + 1, step):
        parent = _hash(parent, ids[4 * (end - step) : 4 * end])
        names.append(BlockHash(parent))
    return names


def _hash(*parts: bytes | memoryview) -> bytes:
    """SHA-256 over length-framed parts: ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()
