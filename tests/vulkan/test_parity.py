"""`qgraph parity` between Vulkan0 and the CPU, as a user types it; of quantised weights speaks `test_quantised`."""

import json

import pytest

from tests.kit import run_qgraph

from .conftest import DEVICE

# no token of it is a near-tie of the router of one of the two
PROMPT = "The quality of mercy is not strained"


def parity(path, *more):
    found = run_qgraph("parity", path, "-p", PROMPT, "--device", DEVICE, "--ref", "CPU", "--graph", "plain", "-t", 1, "--tolerance", "1e-4", "--json",
                       *more, timeout=600)  # fmt: skip
    assert not found.stderr
    return found.returncode, json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", ["toy", "bard"])
def test_every_node_agrees(toys, bard_f32, model):
    code, found = parity(toys.t0 if model == "toy" else bard_f32)
    assert (code, found["first"], found["misses"]) == (0, None, 0)
    assert found["nodes"] > 200 and found["here"].startswith(DEVICE) and found["reference"].startswith("CPU")
