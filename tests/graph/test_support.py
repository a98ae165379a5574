"""What devices can do: what they claim, and what they prove where they are not the CPU (C21). The CPU stands in for a GPU."""

import pytest

import qwen3next_ggml as q
from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError
from qwen3next_ggml.graph import support
from qwen3next_ggml.graph.own import Graph
from qwen3next_ggml.graph.support import resolve_options


@pytest.fixture
def gpu():
    support._agrees.cache_clear()
    device = ggml.device("CPU")
    device.kind = "gpu"
    yield device
    support._agrees.cache_clear()


@pytest.fixture(scope="module")
def hp(bard):
    with q.load(bard, weights=False) as model:
        return model.hparams


def wrong_on_the_first(monkeypatch, op):
    """Let the op be off on the device that is asked, which is asked first, and right on the CPU it is compared with."""
    call, calls = getattr(ggml.Ops, op), []

    def off(self, x, *more):
        calls.append(op)
        return call(self, self.scale(x, -1.0) if len(calls) % 2 else x, *more)

    monkeypatch.setattr(Graph, op, off)
    return calls


def test_what_is_claimed_and_right_is_used(hp, gpu):
    options = resolve_options("auto", "auto", "auto", hp, [gpu])
    assert (options.delta_net, options.flash_attn) == ("fused", True)


def test_a_device_proves_itself_once(hp, gpu, monkeypatch):
    resolve_options("auto", "auto", "auto", hp, [gpu])
    monkeypatch.setattr(Graph, "compute", None)
    assert resolve_options("auto", "auto", "auto", hp, [gpu]).delta_net == "fused"


@pytest.mark.parametrize("op, what", [("gated_delta_net", "delta_net"), ("flash_attn_ext", "flash_attn")])
def test_what_is_claimed_and_wrong_is_not_used(hp, gpu, monkeypatch, op, what):
    assert wrong_on_the_first(monkeypatch, op) == []
    options = resolve_options("auto", "auto", "auto", hp, [ggml.device("CPU"), gpu])
    assert (options.delta_net, options.flash_attn) == (("chunked", True) if what == "delta_net" else ("fused", False))
    wanted = {"delta_net": "auto", "flash_attn": "auto"} | {what: "fused" if what == "delta_net" else "on"}
    with pytest.raises(BackendError, match="CPU: no .* that is right for"):
        resolve_options("auto", wanted["delta_net"], wanted["flash_attn"], hp, [gpu])


def test_the_cpu_proves_nothing(hp, monkeypatch):
    calls = wrong_on_the_first(monkeypatch, "gated_delta_net")
    support._agrees.cache_clear()
    assert resolve_options("auto", "auto", "auto", hp, [ggml.device("CPU")]).delta_net == "fused" and not calls


def test_what_is_not_claimed_is_not_tried(hp, gpu, monkeypatch):
    calls = wrong_on_the_first(monkeypatch, "gated_delta_net")
    monkeypatch.setattr(ggml.Device, "supports_op", lambda self, node: False)
    options = resolve_options("auto", "auto", "auto", hp, [gpu])
    assert (options.delta_net, options.flash_attn) == ("chunked", False) and not calls
