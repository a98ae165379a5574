"""C07: nothing is ever added to a norm, on any path of any graph: the file's weights are final; and a file whose are not is told."""

from itertools import product

import pytest

import qwen3next_ggml
from qwen3next_ggml.graph import norm
from qwen3next_ggml.graph.support import resolve_options
from qwen3next_ggml.graph_view import outline
from qwen3next_ggml.graph_view.records import VIEW
from qwen3next_ggml.models import qwen3next
from tests.kit import read_arrays, run_qgraph
from tests.kit.gguf_bytes import edit_gguf

# per layer of either kind, of the head, and of the NextN block
NORMS = {"attn_norm", "post_attention_norm", "ssm_norm", "attn_q_norm", "attn_k_norm"}
NEXTN = {"attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "nextn.hnorm", "nextn.enorm", "nextn.shared_head_norm"}
FORMS = [*product(("fused", "chunked", "autoregressive"), ("plain", "lean"), (False,)), ("fused", "plain", True), ("fused", "lean", True)]


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.file(mtp=True, optional=("nextn_shared_head_norm",)), weights=False) as model:
        yield model


def view_of(model, delta_net, graph, mtp):
    options = resolve_options(graph, delta_net, "on", model.hparams, model.devices)
    return outline(model, options, n_tokens=1 if delta_net == "autoregressive" else 70, mtp=mtp)


def kernel_of(view, id):
    """What computes a value, through views of it."""
    node = view.by_id[id]
    return kernel_of(view, node.sources[0]) if node.kind == VIEW else node


def faults(view):
    """Readers of a norm's weight that are anything but a product with a bare norm."""
    weights = {leaf.id for leaf in view.leaves if leaf.id.endswith("norm.weight")}
    found, seen = [], set()
    for node in view.nodes:
        read = weights & {kernel_of(view, source).id for source in node.sources}
        seen |= read
        others = [kernel_of(view, source).op for source in node.sources if kernel_of(view, source).id not in weights]
        if read and (node.op, others) != ("MUL", ["RMS_NORM"]):
            found.append((node.name, node.op, others, sorted(read)))
        if node.op == "ADD" and any(kernel_of(view, source).op == "RMS_NORM" for source in node.sources):
            found.append((node.name, node.op, others, []))
    return found, {name.removeprefix("blk.").partition(".")[2].removesuffix(".weight") for name in seen if name.startswith("blk.")}


@pytest.mark.parametrize("delta_net, graph, mtp", FORMS)
def test_a_norms_weight_only_ever_multiplies(model, delta_net, graph, mtp):
    found, seen = faults(view_of(model, delta_net, graph, mtp))
    assert found == [] and seen == (NEXTN if mtp else NORMS)


def plus_one_on_the_weight(monkeypatch):
    monkeypatch.setattr(qwen3next, "rms_norm", lambda g, x, weight, eps, il: g.mul(g.rms_norm(x, eps), g.scale_bias(weight, 1.0, 1.0)))


def plus_the_norm_itself(monkeypatch):
    rms_norm = norm.rms_norm
    monkeypatch.setattr(qwen3next, "rms_norm", lambda g, x, weight, eps, il: g.add(rms_norm(g, x, weight, eps, il), g.rms_norm(x, eps)))


@pytest.mark.parametrize("mutation", [plus_one_on_the_weight, plus_the_norm_itself])
def test_an_offset_is_seen(model, monkeypatch, mutation):
    mutation(monkeypatch)
    assert len(faults(view_of(model, "fused", "plain", False))[0]) >= 8


@pytest.mark.parametrize("which", ["blk.4.", "nextn", "norm.weight"])
def test_every_norm_that_lacks_its_offset_is_named(toys, tmp_path, which):
    """Those of the NextN block alone, its own two or three alone, all there are; in strict mode that is not success."""
    source, path = toys.file(mtp=True, optional=("nextn_shared_head_norm",)), tmp_path / "t.gguf"
    arrays = {name: x for name, x in read_arrays(source).items() if name.endswith("norm.weight") and which in name}
    edit_gguf(source, path, replace={name: ("f32", x - 1) for name, x in arrays.items()})
    assert len(arrays) == {"blk.4.": 7, "nextn": 3, "norm.weight": 21}[which]
    done = run_qgraph("validate", path, "--strict")
    [warning, verdict] = done.stdout.splitlines()
    assert done.returncode == 3 and verdict.endswith("complete, 1 warning")
    listed = warning.removeprefix("warning: norm weights centred at 0 instead of 1: ").partition(";")[0]
    assert set(listed.split(", ")) == arrays.keys() and "a converter that did not add the offset" in warning
    assert run_qgraph("validate", path).returncode == 0
