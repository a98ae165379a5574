"""C27 on a real second device: state on one, layers on another; placement changes speed, not results."""

import numpy as np
import pytest

import qwen3next_ggml as q
from tests.kit import nmse

from .conftest import DEVICE

LIMIT = 1e-4
N_STEPS = 100
PLACES = {
    "state on the CPU": (DEVICE, "CPU"),
    "state on Vulkan0": ("CPU", DEVICE),
    "first half on Vulkan0": ((DEVICE, "CPU"), None),
    "last half on Vulkan0": (("CPU", DEVICE), None),
}


def decode(path, device="CPU", kv_device=None):
    """Return the logits of a prompt of eleven tokens and of a hundred steps after it."""
    rng = np.random.default_rng(27)
    with q.load(path, device=device, n_threads=1) as model:
        ids = rng.integers(0, model.hparams.n_vocab, 11 + N_STEPS).tolist()
        with model.session(n_ctx=256, graph="plain", kv_device=kv_device) as s:
            rows = [s.decode(ids[:11], logits="all"), *(s.decode([t]) for t in ids[11:])]
            where = {place.name for place in s.graphs.state_devices}
    return np.concatenate(rows), where


@pytest.fixture(scope="module")
def on_cpu(toys):
    return decode(toys.t0)[0]


@pytest.mark.parametrize("place", PLACES)
def test_placement_changes_no_result(toys, on_cpu, place):
    device, kv_device = PLACES[place]
    logits, where = decode(toys.t0, device, kv_device)
    assert where == ({"CPU", DEVICE} if kv_device is None else {kv_device})
    # the worst step, not the mean: a state that is not copied is off more with every step
    assert max(map(nmse, logits, on_cpu)) <= LIMIT
    assert nmse(logits[:-1], on_cpu[1:]) > 100 * LIMIT


def test_quantised_experts_on_one_device_the_rest_on_the_other(bard):
    """A model of eight layers over both devices, its state on the CPU, goes on from a session saved on the CPU."""
    logits = []
    for options in ({"device": "CPU"}, {"device": (DEVICE, "CPU")}):
        with q.load(bard, n_threads=1, **options) as model, model.session(n_ctx=256, graph="plain", kv_device="CPU") as s:
            logits.append(np.concatenate([s.decode(model.tokenizer.encode("To be, or not to be, that is the"))] + [s.decode([t]) for t in (5, 9)]))
    assert nmse(*logits[::-1]) < 5e-3
