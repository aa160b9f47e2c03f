"""The machine that was measured on, and whether it was ours alone."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

OTHERS_CORES_MAX = 0.1
"""Cores' worth of time that strangers may take before figures are called disturbed."""


@dataclass
class Watch:
    """What happened on the machine between two moments."""

    load_before: float
    load_after: float = 0.0
    others_cores: float = 0.0
    """Mean number of cores that were busy with something that we did not start."""

    def facts(self, *, alone: bool) -> dict[str, Any]:
        """For the report. Not `alone`: what was measured is not ours either, and cannot be told from others."""
        told = {"load average": f"{self.load_before:.2f} before, {self.load_after:.2f} after"}
        if not alone:
            return told
        told["taken by others"] = f"{self.others_cores:.2f} cores in the mean"
        if self.others_cores > OTHERS_CORES_MAX:
            told["WARNING"] = "disturbed: others were busy on this machine; do not keep these figures"
        return told


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch the machine. Processes that we started must have been waited for at the end, to be counted as ours."""
    watch = Watch(os.getloadavg()[0])
    began, all_before, own_before = _uptime_s(), _all_s(), _own_s()
    yield watch
    others_s = _all_s() - all_before - (_own_s() - own_before)
    watch.load_after = os.getloadavg()[0]
    watch.others_cores = max(0.0, others_s / max(_uptime_s() - began, 1e-3))


def machine_facts() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "torch": version("torch"),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def _all_s() -> float:
    """Seconds that all cores together have worked since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _own_s() -> float:
    """Seconds that this process and its children, as far as they have ended, have worked."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
