"""What this machine has for a process: cores and memory, within the limits of a container (level 0)."""

import os
from pathlib import Path

CGROUP = "/sys/fs/cgroup"


def available_cpus() -> int:
    """Return how many threads compute best here: the cores this process may use, as llama.cpp counts them.

    Two hardware threads of one core count once; a limit on CPU time, such as a container's, counts too.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings") or cpu for cpu in cpus}
    quota, _, period = _text(f"{CGROUP}/cpu.max").partition(" ")
    limit = -(-int(quota) // int(period)) if quota.isdecimal() and period.isdecimal() else len(cores)
    return max(1, min(len(cores), limit))


def available_memory() -> int | None:
    """Return the bytes of memory that can still be taken, None where the system does not say; files that are cached can make room."""
    free = _fields("/proc/meminfo").get("MemAvailable:")
    if free is None:
        return None
    limit, used = _text(f"{CGROUP}/memory.max"), _fields(f"{CGROUP}/memory.stat").get("anon", 0)
    return min(1024 * free, max(int(limit) - used, 0)) if limit.isdecimal() else 1024 * free


def total_memory() -> int:
    """Return the machine's bytes of memory, 0 where the system does not say."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def _fields(path: str) -> dict[str, int]:
    """Read a file of lines that begin with a name and a number."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
