"""`qgraph parity` between Vulkan0 and the CPU, as a user types it."""

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


def test_rounded_activations_are_named_at_their_product(bard):
    """Both devices round what they multiply with Q8_0 weights to 8 bits, each in its own way: the first node that shows it is a product."""
    code, found = parity(bard)
    assert code == 1
    assert found["first"]["kernel"] == "MUL_MAT" and found["first"]["nmse"] < 1e-3
    # experts that are near each other may come out in the other order; what comes out of the model hardly differs
    assert found["first"]["name"].endswith("-0") and found["first"]["line"].startswith("graph/linear.py:")
