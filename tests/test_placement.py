"""Where things are kept and computed: state apart from its layers, backends that start over, nodes on their devices.

A second device is imitated by the CPU here; tests/vulkan has a real one.
"""

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError
from qwen3next_ggml.executor import OneDevice, OneDeviceRenewed
from qwen3next_ggml.graph.own import Graph

TOKENS = list(range(9))


def decode(session):
    return np.concatenate([session.decode(TOKENS, logits="all"), *(session.decode([t]) for t in (5, 6, 7))])


@pytest.fixture
def keeps_bindings(monkeypatch):
    """The CPU as a device whose driver goes through old bindings."""
    monkeypatch.setattr(ggml.Device, "keeps_bindings", True)


@pytest.fixture
def plain_logits(toys):
    with q.load(toys.t0, n_threads=1) as model, model.session(n_ctx=256) as s:
        return decode(s)


def test_state_where_the_layers_are_changes_nothing(toys, plain_logits):
    with q.load(toys.t0, n_threads=1) as model, model.session(n_ctx=256, kv_device="CPU") as s:
        assert isinstance(s.graphs.executor, OneDevice)
        assert np.array_equal(decode(s), plain_logits)
        assert s.settings["kv_device"] == "CPU"


def test_state_on_a_device_that_is_not_there(toys):
    with q.load(toys.t0, n_threads=1) as model, pytest.raises(BackendError, match="no device Vulkan7"):
        model.session(kv_device="Vulkan7")


def test_nodes_go_where_the_state_is_that_they_touch(toys, monkeypatch):
    """Every node that reads or writes a state, and no other, is the state device's; a view goes with what it looks at."""
    with q.load(toys.t0, device=["CPU", "CPU"], n_threads=1) as model, model.session(n_ctx=256) as s:
        monkeypatch.setattr(s.graphs, "state_devices", ["state"] * model.hparams.n_layer)
        built = s.graphs.build(s.probes.base)
        there = []
        for node, device in built.device_of.items():
            if node.view_src in built.device_of:
                assert device == built.device_of[node.view_src]
                continue
            touches = any((x.view_src or x).name.startswith("cache_") for x in (node, *node.src))
            assert touches == (device == "state")
            there += [node.op] if touches else []
        built.close()
    assert len(built.device_of) > 100 and len(there) >= 12


def test_a_backend_starts_over():
    backend = ggml.device("CPU").init()
    assert backend.n_starts == 1
    backend.renew()
    assert backend.n_starts == 2 and not backend.closed
    backend.close()


def test_a_device_that_keeps_bindings_starts_over_between_graphs(toys, plain_logits, keeps_bindings):
    with q.load(toys.t0, n_threads=1) as model, model.session(n_ctx=256) as s:
        assert isinstance(s.graphs.executor, OneDeviceRenewed)
        assert np.array_equal(decode(s), plain_logits)
        # nine tokens, then three times one
        assert s.graphs.executor.backend.n_starts == 3


def test_so_do_several_devices(toys, plain_logits, keeps_bindings):
    with q.load(toys.t0, device=["CPU", "CPU"], n_threads=1) as model, model.session(n_ctx=256) as s:
        assert np.array_equal(decode(s), plain_logits)
        assert [backend.n_starts for backend in s.graphs.executor.backends] == [3, 3]


def test_a_graph_of_ones_own_starts_over_each_time(keeps_bindings):
    with Graph(n_threads=1) as g:
        x = g.tensor(np.arange(4))
        assert g.compute(g.scale(x, 2.0)).tolist() == [0, 2, 4, 6]
        assert g.compute(g.scale(x, 3.0)).tolist() == [0, 3, 6, 9]
        assert g._backend.n_starts == 3


@pytest.mark.parametrize("description, keeps", [("llvmpipe (LLVM 15.0.6, 256 bits)", True), ("NVIDIA GeForce RTX 3090", False)])
def test_which_devices_keep_bindings(description, keeps):
    device = ggml.device("CPU")
    device.description = description
    assert device.keeps_bindings is keeps
