"""Names of things that cross process borders."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One request of one client; chosen at the edge, in every log line."""

InstanceId = NewType("InstanceId", str)
"""The lasting name of an instance, such as `decode-0`. A restart keeps it."""

Incarnation = NewType("Incarnation", str)
"""One life of an instance: random, new at every start."""

SegmentId = NewType("SegmentId", str)
"""The name of a KVCache pool instance's memory; equal to its instance's id."""

LeaseId = NewType("LeaseId", str)
"""One time-limited claim on blocks."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes of SHA-256: what a block holds and what went before it."""
