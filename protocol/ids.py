"""Names of things that cross process borders, and tokens by the thousand."""

import hashlib
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array
"""Token ids, made by `token_ids`: unsigned, 32 bits each. On the wire they are their bytes, little-endian."""

assert (array("I").itemsize, sys.byteorder) == (4, "little"), "tokens and KV travel as they lie in memory"

RequestId = NewType("RequestId", str)
"""One request of one client; chosen at the edge, in every log line."""

InstanceId = NewType("InstanceId", str)
"""The lasting name of an instance, such as `decode-0`. A restart keeps it."""

Incarnation = NewType("Incarnation", str)
"""One life of an instance: random, new at every start."""

SegmentId = NewType("SegmentId", str)
"""The name of a KVCache pool instance's memory; equal to its instance's id."""

BLOCK_HASH_BYTES = 32

LeaseId = NewType("LeaseId", str)
"""One time-limited claim on blocks."""

TenantId = NewType("TenantId", int)
"""Whose blocks these are: 64 bits that stand for a tenant's name, since every slot of a pool remembers them."""

NO_TENANT = TenantId(0)
"""Of those that name none."""

BlockHash = NewType("BlockHash", bytes)
"""BLOCK_HASH_BYTES of SHA-256: what a block holds and what went before it."""


def tenant_id(name: str) -> TenantId:
    """What stands for this tenant in the pool; the same in every process. Nobody finds a name for another's."""
    if not name:
        return NO_TENANT
    return TenantId(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") or 1)


def token_ids(tokens: Iterable[int] = ()) -> Ids:
    """These tokens, packed; a copy. Raises OverflowError for a number that has no 32 bits without sign."""
    return array("I", tokens)
