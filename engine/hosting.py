"""An engine as a compute instance hosts it: loaded, sized, and tested before anybody is told that it is ready."""

import os

from engine.api import Engine
from engine.config import ComputeSettings
from engine.manifest import Model
from engine.paging import pages_for
from engine.runner import load_engine

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
        threads=settings.threads or len(os.sched_getaffinity(0)),
    )
    await engine.self_test()
    return engine
