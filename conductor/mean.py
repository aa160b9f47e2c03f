"""A mean of what comes one by one, of which the latest counts. Pure."""

from dataclasses import dataclass

MEAN_SAMPLES = 1000
"""A running mean follows its samples with this weight at the latest: as far back as `lengths` looks."""


@dataclass
class Mean:
    """A running mean; recent samples weigh more once there are MEAN_SAMPLES."""

    value: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        """One more."""
        self.samples = min(self.samples + 1, MEAN_SAMPLES)
        self.value += (sample - self.value) / self.samples
