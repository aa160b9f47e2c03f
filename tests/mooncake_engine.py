"""Whether Mooncake's Transfer Engine is installed here: its wheel, and the system's libraries that it wants."""

import pytest

from kvcache_pool.transfer.mooncake_engine import MooncakeSettings

MOONCAKE = MooncakeSettings()


def missing() -> str:
    """What the error says; empty where nothing is missing."""
    try:
        MOONCAKE.require()
    except ValueError as error:
        return str(error)
    return ""


needs_mooncake = pytest.mark.skipif(missing() != "", reason=missing() or "it is here")
