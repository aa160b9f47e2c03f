"""What is measured: the model, the threads, how often; the same for the service and what it is compared with."""

import os
import random
from argparse import Namespace
from dataclasses import dataclass

from engine.manifest import Model, open_model
from prefill_pool.config import PrefillConfig
from protocol.settings import load_section


@dataclass(frozen=True)
class Setup:
    """The choices of one run of benchmarks. Everything else is as `dango serve` has it by default."""

    model: str = ""
    """As MODEL of `dango serve`."""
    dtype: str = ""
    """Empty: the service's default."""
    threads: int = 1
    """Of each compute instance, and of the engine alone."""
    port: int = 0
    """Of the service that is started; 0 takes any free one."""
    runs: int = 5
    seed: int = 0
    """What prompts are drawn from."""

    def dice(self) -> random.Random:
        """Draws the prompts of one benchmark."""
        return random.Random(self.seed)

    def prefill(self) -> PrefillConfig:
        """The settings that the service's prefill instance will have. Raises SettingsError."""
        flags = Namespace(model=self.model or None, dtype=self.dtype or None, threads=self.threads)
        return load_section(PrefillConfig, "prefill", flags=flags, environ=os.environ)

    def open(self) -> Model:
        """The model, fetched at need. Raises as open_model does."""
        return open_model(self.prefill())


def default_threads() -> int:
    """What `dango serve` gives to one prefill and one decode instance."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def random_prompt(dice: random.Random, tokens: int, vocab: int) -> list[int]:
    """Tokens at random: a prompt that nothing has cached."""
    return [dice.randrange(vocab) for _ in range(tokens)]
