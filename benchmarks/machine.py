"""The machine a figure was taken on: its CPU, and what else kept it busy meanwhile."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MachineClock:
    """CPU time since boot: all of it, spent working, taken by other virtual machines, spent by given processes."""

    total: float
    busy: float
    steal: float
    own: float

    @classmethod
    def read(cls, pids=()):
        user, nice, system, idle, iowait, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        busy = user + nice + system + irq + softirq
        return cls(busy + idle + iowait + steal, busy, steal, sum(map(_process_ticks, (*pids, os.getpid()))))

    def share_since(self, start) -> dict:
        total = max(1.0, self.total - start.total)
        others = (self.busy - start.busy) - (self.own - start.own)
        return {"other_processes": max(0.0, others / total), "stolen": (self.steal - start.steal) / total}


def _process_ticks(pid) -> int:
    """Ticks of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def about() -> dict:
    """CPU, count of CPUs, memory and the setting of huge pages."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu_name(), "n_cpu": os.cpu_count(), "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        "huge_pages": pages.read_text().partition("[")[2].partition("]")[0] if pages.exists() else "none", "system": platform.release(),
    }  # fmt: skip


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def warm(path) -> None:
    """Read a file into the page cache, in huge pages where its file system has them and nothing of it is there yet."""
    import mmap

    import numpy as np

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            # a kernel without huge pages: small ones do
            pages.madvise(mmap.MADV_NORMAL)
        np.frombuffer(pages, np.uint8)[:: mmap.PAGESIZE].max()


def evict(path) -> None:
    """Drop a file from the page cache, so that `warm` reads it anew."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
