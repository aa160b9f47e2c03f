"""How long things of the KVCache pool last."""

LEASE_S = 30.0
"""How long a lease lasts without renewal. Every transfer's deadline is shorter, so that a reader or
writer gives up before its blocks can go to somebody else."""

DIRECTORY_S = 5.0
"""The deadline of a call to the directory, which answers from memory in well under a millisecond."""

NOTED_S = 10.0
"""How long who forgets blocks waits for the segments to note it: ages, unless there are millions of them. A
segment that has died is given up sooner."""

ANNOUNCE_EVERY_S = 0.5
"""How often a segment tells the directory that it is there."""

TRANSFER_S_MAX = 20.0
"""The deadline of one read or write of one layer, and of one write of whole blocks."""
