"""Huge pages are asked for where whole pages can be, and nowhere else."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.ggml import types
from tests.kit import run_python


def flags(address):
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in open("/proc/self/smaps"):
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


def test_a_buffer_is_advised_and_keeps_its_data():
    """A buffer nobody has advised: malloc may hand out memory again that numpy has."""
    done = run_python("from tests.ggml import test_pages; test_pages.advise_a_buffer()")
    assert done.returncode == 0, done.stderr


def advise_a_buffer():
    with ggml.Context(1) as ctx:
        x = ctx.new_tensor(types.F32, 10 << 20)
        with ggml.alloc_tensors(ctx, ggml.device("CPU").buffer_type()) as buffer:
            middle = buffer.base + buffer.size // 2
            assert "hg" not in flags(middle)
            x.set(values := np.arange(10 << 20, dtype=np.float32))
            assert ggml.advise_huge_pages(buffer.base, buffer.size)
            assert "hg" in flags(middle) and np.array_equal(x.get(), values)


@pytest.mark.parametrize("offset, size", [(0, 100), (1, 4096), (4095, 4096), (0, 0)])
def test_parts_of_pages_are_left_alone(offset, size):
    page = np.zeros(1 << 16, np.uint8)
    start = -(-page.ctypes.data // 4096) * 4096 + offset
    assert not ggml.advise_huge_pages(start, size)
