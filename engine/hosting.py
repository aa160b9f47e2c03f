"""An engine as a compute instance hosts it: loaded, sized, and tested before anybody is told that it is ready."""

from engine.api import Engine
from engine.manifest import Model
from engine.paging import pages_for
from engine.runner import load_engine

CONTEXTS = 2
"""Requests of the longest context that an instance has pages for, unless told: one runs, one loads."""


async def host_engine(model: Model, *, dtype: str, pages: int, threads: int) -> Engine:
    """Load the weights and pass the self-test. `pages` 0 makes room for CONTEXTS; `threads` 0 takes all cores.

    Blocks until loaded: nothing else is due before that. Raises ValueError, OSError, or what the test met.
    """
    layout = model.manifest.layout
    one = pages_for(model.manifest.context_tokens, layout.block_tokens)
    if 0 < pages < one:
        context = model.manifest.context_tokens
        raise ValueError(f"pages is {pages}, but one request of the context of {context} tokens takes {one}")
    enough = CONTEXTS * one
    engine = load_engine(
        model.checkpoint,
        dtype=dtype,
        pages=pages or enough,
        block_tokens=layout.block_tokens,
        threads=threads,
    )
    await engine.self_test()
    return engine
