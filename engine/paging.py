"""Pages: which rows of an engine's KV memory are free. Pure; no tensor is touched here."""


class Pages:
    """The free list of one engine's pages.

    Always: every page is free or taken exactly once. Mutates: take, give.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # taken from the end: low numbers first
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._taken.update(taken)
        return taken

    def give(self, pages: list[int]) -> None:
        """Return pages that were taken."""
        for page in pages:
            self._taken.remove(page)  # KeyError: given twice
            self._free.append(page)

    def check(self) -> None:
        """Asserts that no page is lost or doubled."""
        assert len(self._free) + len(self._taken) == self.total
        assert not self._taken or self._taken.isdisjoint(self._free)


def pages_for(tokens: int, block_tokens: int) -> int:
    """How many pages hold `tokens` tokens."""
    return -(-tokens // block_tokens)
