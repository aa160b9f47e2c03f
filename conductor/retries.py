"""How many requests may be placed again: a share of all, lest a cluster that fails does its work twice. Pure."""

SHARE = 0.2
"""Of all requests. Instances that die now and then fail far fewer; of those that always fail, four fifths of the
second attempts would be wasted."""


class Retries:
    """A store that every request fills by SHARE, and each second attempt takes 1 from. Mutates: came, take."""

    def __init__(self, spare: int) -> None:
        """`spare`: how many fit, and are there at first: as many as can be lost at once must be made good once."""
        self._spare = float(spare)
        self._left = self._spare

    def came(self) -> None:
        """A request has come."""
        self._left = min(self._left + SHARE, self._spare)

    def take(self, count: int) -> bool:
        """Whether so many may be tried again now; they are counted then."""
        if count > self._left:
            return False
        self._left -= count
        return True
