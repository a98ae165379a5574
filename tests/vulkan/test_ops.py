"""C21, C22 and C24 on Vulkan0: ops against float64 over the shapes that break kernels.

The whole table is `qgraph parity --ops --device Vulkan0`; these are the rows whose shaders compile in seconds in software, which those of
products of two to eight columns do not.
"""

import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.graph.own import Graph
from qwen3next_ggml.parity.op_cases import cases
from qwen3next_ggml.parity.ops import HALF, MISS, OK, check
from tests.kit import run_python

from .conftest import DEVICE

SHAPES = {
    "gated_delta_net": ("S 32, T 1, 1 seq", "S 64, T 4, 2 seq", "S 64, T 65, 1 seq", "S 128, T 65, 2 seq, 2 to 1"),
    "solve_tri": ("n 1,", "n 63, k 31", "n 64, k 64", "n 65, k 33", "n 128, k 128"),
    "mul_mat_id": ("f32, 512 experts, top 10, 33 tokens", "q8_0, 512 experts, top 10, 1 tokens", "q8_0, 512 experts, top 10, 519 tokens",
                   "f32, 4 experts, top 4, 33 tokens", "f16, 512 experts, top 10, 33 tokens"),
    "ssm_conv": ("",), "cumsum": ("",), "tri": ("",), "argsort": ("",), "top_k": ("",), "soft_max": ("",), "rms_norm": ("n 32", "n 2048"),
    "get_rows": ("",), "set_rows": ("of f32", "of f16"), "rope": ("64 of 256",),
}  # fmt: skip
CASES = list(cases())
CHECK = """
import os, sys
device, op, shape, half = sys.argv[1:]
os.environ.pop("GGML_VK_DISABLE_F16", None)
if half == "False":
    os.environ["GGML_VK_DISABLE_F16"] = "1"
from qwen3next_ggml.parity.op_cases import cases
from qwen3next_ggml.parity.ops import check
[case] = [case for case in cases() if (case.op, case.shape) == (op, shape)]
found = check(case, device)
print(found.verdict, found.nmse)
"""


@pytest.mark.parametrize("op", SHAPES)
def test_the_device_is_right(op):
    chosen = [case for case in CASES if case.op == op and any(part in case.shape for part in SHAPES[op])]
    assert len(chosen) >= len(SHAPES[op])
    assert [result for result in (check(case, DEVICE) for case in chosen) if result.verdict != OK] == []


@pytest.mark.parametrize("half, verdict, low, high", [(True, HALF, 1e-6, 2e-5), (False, OK, 0, 1e-12)])
def test_sums_in_float16_are_reported(half, verdict, low, high):
    """Where the device has float16 ggml keeps the sums of these products in it, and no precision can be asked of `mul_mat_id`."""
    said, off = run_python(CHECK, DEVICE, "mul_mat_id", "f16, 512 experts, top 10, 33 tokens", half, timeout=300).stdout.split()
    assert said == verdict and low < float(off) < high


def test_what_is_off_is_a_miss(monkeypatch):
    [good] = [case for case in CASES if case.op == "solve_tri" and case.shape.startswith("n 64, k 64")]
    solve = ggml.Ops.solve_tri
    monkeypatch.setattr(Graph, "solve_tri", lambda self, a, b, *how: solve(self, a, self.scale(b, 1.001), *how))
    assert check(good, DEVICE).verdict == MISS
