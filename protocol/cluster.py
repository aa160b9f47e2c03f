"""The manifest: what every member of one cluster must have in common, checked before the first block moves."""

from dataclasses import fields

from protocol.blocks import BlockLayout, HashRoot
from protocol.errors import RemoteError
from protocol.message import Message

PROTOCOL_VERSION = 5
"""Raised when messages change in a way that an older process would misread."""


class Mismatch(RemoteError):
    """A process that differs from its cluster in something that would corrupt text or crash; names the field."""

    kind = "mismatch"


class Manifest(Message):
    """The model as the cluster serves it, and the KV that it makes."""

    model: str
    """The name that clients use."""
    model_digest: str
    """Fingerprint of architecture and weights."""
    tokenizer_digest: str
    """Fingerprint of vocabulary, merges, special tokens and chat template."""
    context_tokens: int
    """The longest prompt plus output, in tokens."""
    layout: BlockLayout
    """Shape and element type of a KV block."""
    protocol_version: int = PROTOCOL_VERSION

    def require_equal(self, other: "Manifest") -> None:
        """Raises Mismatch naming the first field that differs, with both values."""
        for name, mine, theirs in self._pairs(other):
            if mine != theirs:
                raise Mismatch(f"{name} is {theirs!r}, but this cluster has {mine!r}")

    def _pairs(self, other: "Manifest") -> list[tuple[str, object, object]]:
        """Every scalar field with both values, the layout's taken apart so that the message can name one."""
        mine_layout, other_layout = self.layout, other.layout
        flat = [f.name for f in fields(self) if f.name not in ("layout", "protocol_version")]
        return [
            ("protocol_version", self.protocol_version, other.protocol_version),
            *((f.name, getattr(mine_layout, f.name), getattr(other_layout, f.name)) for f in fields(mine_layout)),
            *((name, getattr(self, name), getattr(other, name)) for name in flat),
        ]

    def root(self, tenant: str = "", salt: str = "") -> HashRoot:
        """Where the block names of one tenant's prompts start."""
        return HashRoot(self.model_digest, self.tokenizer_digest, self.layout, tenant, salt)
