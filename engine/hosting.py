"""An engine as a compute instance hosts it: loaded, sized, and tested before anybody is told that it is ready."""

import os
import platform
from pathlib import Path

from engine.api import Engine
from engine.config import ComputeSettings
from engine.manifest import Model
from engine.paging import pages_for
from engine.runner import load_engine

CPU_FACTS = Path("/proc/cpuinfo")
"""Where Linux tells the processor's model."""

CONTEXTS = 2
"""Requests of the longest context that an instance has pages for, unless told: one runs, one loads."""


async def host_engine(model: Model, settings: ComputeSettings) -> Engine:
    """Load the weights and pass the self-test. `pages` 0 makes room for CONTEXTS.

    Blocks until loaded: nothing else is due before that. Raises ValueError, OSError, or what the test met.
    """
    layout = model.manifest.layout
    one = pages_for(model.manifest.context_tokens, layout.block_tokens)
    if 0 < settings.pages < one:
        context = model.manifest.context_tokens
        raise ValueError(
            f"pages is {settings.pages}, but one request of the context of {context} tokens takes {one}"
        )
    enough = CONTEXTS * one
    engine = load_engine(
        model.checkpoint,
        dtype=settings.dtype,
        pages=settings.pages or enough,
        block_tokens=layout.block_tokens,
        threads=_threads(settings),
    )
    await engine.self_test()
    return engine


def kind_of(settings: ComputeSettings) -> str:
    """The kind that is set, or one that says which processor computes, with how many threads, in which type."""
    return settings.kind or f"{_processor()}, {_threads(settings)} threads, {settings.dtype}"


def _threads(settings: ComputeSettings) -> int:
    return settings.threads or len(os.sched_getaffinity(0))


def _processor() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    try:
        lines = CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
