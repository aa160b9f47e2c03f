"""The kvcache section of the configuration."""

from dataclasses import dataclass
from typing import Literal

INSTANCE_BYTES_MAX = 58
"""The segment's file has room for so many, and for what its disk tier adds to them."""


@dataclass(frozen=True)
class KVCacheConfig:
    """One KVCache instance: a segment of this machine's memory, and perhaps the pool's directory."""

    conductor: str = "tcp://127.0.0.1:8002"
    """Address of the Conductor's control port, where this instance registers; of several, with commas between."""

    listen: str = "tcp://127.0.0.1:0"
    """Address to listen at; port 0 takes any free one."""

    instance: str = "kvcache-0"
    """Lasting name of this instance and of its segment; must be unique in the cluster."""

    host: str = ""
    """Name of this machine: instances of equal host share memory. Empty means the machine's own name."""

    directory: bool = True
    """Whether this instance also keeps the pool's directory; exactly one of a cluster should."""

    size_bytes: int = 768 << 20
    """Memory given to KV blocks, in /dev/shm; it is claimed whole at the start."""

    disk_path: str = ""
    """Folder for the disk tier: cached blocks are saved there and survive a restart. Empty means none."""

    disk_bytes: int = 4 << 30
    """Most that the disk tier takes of that folder; it is claimed whole at the start."""

    copies_share: float = 0.25
    """Most of each segment's blocks that may be copies of blocks that other segments hold too, from 0 to 1."""

    hard_pins_share: float = 0.5
    """Most of each segment's blocks that may be pinned hard, from 0 to 1: what is left serves everybody else."""

    tenant_share: float = 1.0
    """Most of the memory of all segments that may hold one tenant's blocks, above 0 to 1; 1 sets no bound. The
    instance with the directory decides. Who names no tenant is not bound."""

    eviction: Literal["lru", "lfu", "length_aware", "s3_fifo"] = "lru"
    """Which cached block goes first when room is needed."""

    watermark: float = 1.0
    """Share of a segment in use above which idle blocks are evicted in advance; 1 turns that off."""
    # Off: at 0.9 it costs up to a tenth of the hits on the public traces (docs/results.md), and saves a writer
    # only the eviction of what it needs, which takes microseconds.

    watermark_step: float = 0.05
    """How far below the watermark the use then comes, as a share of the segment."""

    transport: Literal["auto", "mooncake"] = "auto"
    """How other hosts reach the memory: auto is TCP; mooncake is Mooncake's Transfer Engine too, which shows KV to
    whoever reaches its ports."""

    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    """What Mooncake's Transfer Engine speaks, the same on all hosts."""

    mooncake_devices: str = ""
    """Network cards for it, as it names them, with commas between; empty takes all there are."""

    events: str = ""
    """Address at which the directory publishes KV events, such as tcp://127.0.0.1:5557; empty: none. They tell
    prompts' tokens to whoever can connect."""

    events_replay: str = ""
    """Address at which missed KV events can be had again, such as tcp://127.0.0.1:5558; empty: none."""

    events_topic: str = ""
    """Topic of the KV events; empty means kv@<instance>@<model>."""

    events_form: Literal["map", "array"] = "map"
    """How one KV event travels: as vLLM has it since June 2026, or, for older listeners, before."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log that is written."""

    def __post_init__(self) -> None:
        """Raises ValueError for what no service could use."""
        if not 0 < len(self.instance.encode(errors="replace")) <= INSTANCE_BYTES_MAX:
            raise ValueError(f"instance must have 1 to {INSTANCE_BYTES_MAX} bytes, not {self.instance[:80]!r}")
        for name in ("copies_share", "hard_pins_share", "watermark", "watermark_step"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if not 0.0 < self.tenant_share <= 1.0:
            raise ValueError(f"tenant_share must be above 0 and at most 1, not {self.tenant_share}")
        if self.watermark_step > self.watermark:
            raise ValueError(f"watermark_step must be at most watermark, not {self.watermark_step}")
        if self.events_replay and not self.events:
            raise ValueError("events_replay has nothing to replay: events is empty")
