"""Q8_0 weights: Vulkan0 multiplies with them exactly, the CPU rounds activations to 8 bits first, and `qgraph parity` tells which.

So 1e-4 of each other the two are not. Exact is what the same weights give as F32, or the float64 reference.
"""

import json
import re

import pytest

import qwen3next_ggml as q
from tests.kit import nmse, run_python, run_qgraph

from .conftest import DEVICE, both, decode, tokens

STEPS = tuple(range(100, 112))
PROMPT = "The quality of mercy is not strained"
# the first product of the first layer
FIRST = ("linear_attn_qkv_mixed-0", "MUL_MAT", {"name": "blk.0.attn_qkv.weight", "type": "q8_0"})


@pytest.fixture(scope="module")
def exact(bard_f32):
    with q.load(bard_f32, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def quantised(bard):
    return both(bard)


@pytest.mark.parametrize("n", [1, 65, 513])
def test_all_of_the_difference_is_the_cpus(exact, quantised, n):
    """In a prompt, and in a dozen steps after it."""
    ids = tokens(exact, n)
    for want, on_cpu, there in zip(decode(exact, ids, STEPS), *quantised.run(ids, STEPS)):
        rounding = nmse(on_cpu, want)
        assert nmse(there, want) <= 1e-5 < rounding < 5e-3
        assert nmse(on_cpu, there) == pytest.approx(rounding, rel=0.1)
        assert all(nmse(a, x) < nmse(b, x) for a, b, x in zip(there, on_cpu, want)), "each row for itself"


def parity(path, device, ref, tolerance, *more):
    found = run_qgraph("parity", path, "-p", PROMPT, "--device", device, "--ref", ref, "--graph", "plain", "-t", 1, "--tolerance", tolerance,
                       "--json", *more, timeout=600)  # fmt: skip
    return found.returncode, json.loads(found.stdout.splitlines()[-1])


def first(found):
    return tuple(found["first"][key] for key in ("name", "kernel", "quantised"))


def test_float64_tells_whose_it_is(bard):
    """Asked one by one: every node of Vulkan0 is near it, and the CPU parts from it at its first product with such weights."""
    code, found = parity(bard, DEVICE, "float64", "1e-6")
    assert (code, found["first"]) == (0, None) and found["nodes"] > 200
    code, found = parity(bard, "CPU", "float64", "1e-6")
    assert (code, first(found)) == (1, FIRST) and 1e-5 < found["first"]["nmse"] < 1e-4


def test_the_product_is_named_and_a_script_tells_whose_it_is(bard, tmp_path):
    path = tmp_path / "product.py"
    code, found = parity(bard, DEVICE, "CPU", "1e-6", "--shrink", path)
    assert (code, first(found)) == (1, FIRST) and 1e-5 < found["first"]["nmse"] < 1e-4
    done = run_python("import runpy, sys\nsys.argv[:] = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')", path)
    here, there = map(float, re.search(r"to float64 +NMSE (\S+) here, (\S+) of the reference", done.stdout).groups())
    assert done.returncode == 1 and here < 1e-12 and 1e-5 < there < 1e-4
