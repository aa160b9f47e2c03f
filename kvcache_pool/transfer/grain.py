"""Whole blocks at once, or layer by layer? For who waits for all layers anyway, as a decode instance does. Pure.

Layer by layer costs something with each layer: waiting for a thread or an answer. In bulk that is paid once, and
what is copied lies in shorter stretches. So bulk wins by a lot while little is read, and by nothing when much is.
Who computes while the next layer loads, as a prefill instance does, loses by bulk at any size.

`python -m bench grain` measures it (docs/results.md): the time of bulk against that of all layers. Above these
sizes the two cannot be told apart, and layer by layer leaves others more gaps.
"""

MAPPED_BULK_BYTES = 8 << 20
"""Through shared memory. SmolLM2's blocks of 369 KB: 0.2 for one, 0.5 to 0.7 for 4, 0.8 to 0.9 for 16, 0.8 to 1.1
for 64. Blocks of 2 MiB, 32 layers of 64 KiB: 0.5 to 0.65 for one, about 1 from 4 on."""

REMOTE_BULK_BYTES = 24 << 20
"""Over TCP. SmolLM2's: 0.1 for one, 0.3 for 4, 0.5 to 0.6 for 16, 0.8 to 0.9 for 64. The large ones: 0.25 for one,
0.5 to 0.6 for 4, 0.6 to 0.8 for 8, 0.6 to 0.95 for 16."""


def in_bulk(count: int, block_bytes: int, *, mapped: bool) -> bool:
    """Whether to read so many blocks whole. `mapped`: all of them lie in shared memory of this host."""
    return count * block_bytes <= (MAPPED_BULK_BYTES if mapped else REMOTE_BULK_BYTES)
