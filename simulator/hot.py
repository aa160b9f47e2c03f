"""The most used blocks of a run, and on how many segments they are."""

from collections import Counter
from collections.abc import Sequence

from kvcache_pool.index import Index
from protocol.blocks import HashRoot, block_hashes
from protocol.ids import BlockHash

HOT_BLOCKS = 100
"""Of so many of the most used blocks the copies are counted, as in Figure 11 of Mooncake's FAST 2025 paper."""

EVERY = 10
"""They are looked up anew at each tenth sample: to find the most used of all blocks takes milliseconds."""


class Hot:
    """Counts how often each block of the prompts is used. Mutates: use, copies."""

    def __init__(self, root: HashRoot) -> None:
        self._root = root
        self._uses: Counter[BlockHash] = Counter()
        self._samples = 0
        self._copies: list[int] = []

    def use(self, prompt: Sequence[int]) -> None:
        """A prompt has come. O(tokens)."""
        self._uses.update(block_hashes(self._root, prompt))

    def copies(self, index: Index) -> list[int]:
        """One more sample: of each of the most used blocks so far, hottest first, on how many segments it is."""
        if self._samples % EVERY == 0:
            self._copies = [index.replicas(name) for name, _ in self._uses.most_common(HOT_BLOCKS)]
        self._samples += 1
        return self._copies
