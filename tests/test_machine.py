"""What a process may take of the machine: cores and memory, within a container's limits."""

import os

import pytest

from qwen3next_ggml import machine


@pytest.mark.parametrize(
    "cpus, siblings, quota, n",
    [
        ({0, 1, 2, 3}, {0: "3", 1: "3", 2: "c", 3: "c"}, "max 100000", 2),
        ({0, 1, 2, 3}, {0: "1", 1: "2", 2: "4", 3: "8"}, "max 100000", 4),
        ({0, 1, 2, 3}, {}, "", 4),
        ({0, 1, 2, 3}, {}, "250000 100000", 3),
        ({2}, {2: "c"}, "1000 100000", 1),
    ],
    ids=["hardware threads", "cores", "nothing known", "a container", "less than one"],
)
def test_threads_are_cores(monkeypatch, cpus, siblings, quota, n):
    files = {f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings": text for cpu, text in siblings.items()}
    monkeypatch.setattr(machine, "_text", (files | {"/sys/fs/cgroup/cpu.max": quota}).get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    assert machine.available_cpus() == n


@pytest.mark.parametrize("limit, used, room", [
    ("max", 0, 9000 * 1024), ("", 0, 9000 * 1024), ("5000000", 1000000, 4000000), ("5000000", 6000000, 0), ("99999999999", 0, 9000 * 1024),
], ids=["no limit", "no container", "a container", "more than it may", "a wide container"])  # fmt: skip
def test_memory_is_what_the_system_and_the_container_leave(monkeypatch, limit, used, room):
    """Pages of files are not counted against a container: they make room."""
    files = {
        "/proc/meminfo": "MemTotal: 20000 kB\nMemAvailable: 9000 kB\nHugePages_Total: 0\n",
        "/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.stat": f"anon {used}\nfile 123456789\n",
    }  # fmt: skip
    monkeypatch.setattr(machine, "_text", files.get)
    assert machine.available_memory() == room


def test_where_the_system_does_not_say_nothing_is_guessed(monkeypatch):
    monkeypatch.setattr(machine, "_text", lambda _: "")
    assert machine.available_memory() is None
