"""The sections of the services: what would break an instance later is refused by name at its start."""

import pytest

from conductor.config import ConductorConfig
from decode_pool.config import DecodeConfig
from kvcache_pool.config import KVCacheConfig
from prefill_pool.config import PrefillConfig
from protocol.settings import SettingsError, load_section


@pytest.mark.parametrize(
    ("section", "name", "setting", "value", "says"),
    [
        (PrefillConfig, "prefill", "chunk_tokens", "100", "a multiple of block_tokens"),
        (PrefillConfig, "prefill", "queue_max", "0", "queue_max must be more than 0"),
        (PrefillConfig, "prefill", "threads", "-1", "threads must be 0 or more"),
        (PrefillConfig, "prefill", "transport", "rdma", "transport must be one of auto, tcp, mooncake"),
        (DecodeConfig, "decode", "batch_max", "0", "batch_max must be more than 0"),
        (DecodeConfig, "decode", "dtype", "int8", "dtype must be one of bfloat16, float16, float32"),
        (ConductorConfig, "conductor", "port", "70000", "port must be from 0 to 65535"),
        (ConductorConfig, "conductor", "in_flight_max", "0", "in_flight_max must be more than 0"),
        (KVCacheConfig, "kvcache", "log_level", "loud", "log_level must be one of debug, info, warning, error"),
    ],
)
def test_a_setting_out_of_range_is_told_by_name(
    section: type, name: str, setting: str, value: str, says: str
) -> None:
    environ = {f"DANGO_{name.upper()}_{setting.upper()}": value}
    with pytest.raises(SettingsError, match=says):
        load_section(section, name, environ=environ)
    load_section(section, name, environ={})
