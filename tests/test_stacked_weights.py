"""Weights multiplied with the same vector: laid one behind the other at load, multiplied at once, the same numbers to the bit."""

from dataclasses import replace

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.graph.options import LEAN

from .kit import read_arrays
from .test_tensors import Loaded, changed, values_of

GROUPS = {
    0: [("attn_qkv", "attn_gate", "ssm_ba"), ("ffn_gate_inp", "ffn_gate_inp_shexp"), ("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_shexp", "ffn_up_shexp")],
    3: [("attn_q", "attn_k", "attn_v"), ("ffn_gate_inp", "ffn_gate_inp_shexp"), ("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_shexp", "ffn_up_shexp")],
}  # fmt: skip
TEXT = list(range(1, 30))


def of(weights, il, *names):
    return [getattr(weights.blk[il], name) for name in names]


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
def test_copied_weights_lie_one_behind_the_other(toys, type):
    path = toys.file(type=type, mtp=True)
    with Loaded(path, mmap=False) as w, Loaded(path, mmap=True) as mapped:
        for il, groups in (GROUPS | {4: GROUPS[3]}).items():
            for names in groups:
                parts = of(w, il, *names)
                stack = w.stacks[parts[0]]
                assert stack.parts == tuple(parts) and all(part.view_src == stack.whole for part in parts), (il, names)
                assert [part.view_offs // stack.whole.nb[1] for part in parts] == [offset // 4 for _, offset in stack.cuts]
        assert len(w.stacks) == 5 * 4 and not mapped.stacks
        assert all(np.array_equal(value, mapped.by_name[name].get()) for name, value in values_of(w).items())
        assert w.planned["copied"] == mapped.planned["mapped"] + mapped.planned["copied"] == sum(w.planned.values())


def test_rewritten_weights_lie_one_behind_the_other(toys):
    """The matrices do; of many in one tensor a part would be no tensor."""
    path = toys.file(type="q4_k", geometry="tiny-q", n_vocab=104)
    with Loaded(path, repack=True) as w:
        for il, groups in GROUPS.items():
            for names in groups:
                parts = of(w, il, *names)
                stack = w.stacks.get(parts[0])
                assert (stack is not None) == (w.placed[parts[0].name] == "repacked" and parts[0].ne[2] == 1), names
                assert stack is None or all(part.view_src == stack.whole for part in stack.parts)


@pytest.mark.parametrize("name, il, names", [
    ("blk.0.attn_gate.weight", 0, ("attn_qkv", "ssm_ba")), ("blk.3.attn_v.weight", 3, ("attn_q", "attn_k")),
])  # fmt: skip
def test_other_types_lie_apart(toys, tmp_path, name, il, names):
    """The rest of a group still lies together."""
    half = changed(toys, tmp_path, replace={name: ("f16", read_arrays(toys.t0)[name])})
    with Loaded(half, mmap=False) as w:
        assert getattr(w.blk[il], name.split(".")[2]).view_src is None
        assert (of(w, il, *names)[0] in w.stacks) == (il == 3)


@pytest.mark.parametrize("repack", [True, "auto"])
def test_one_product_of_rewritten_weights_is_the_same_to_the_bit(toys, repack):
    path = toys.file(type="q4_k", geometry="tiny-q", n_vocab=104)
    with qwen3next_ggml.load(path, repack=repack, n_threads=1) as model:
        assert np.array_equal(logits(model, LEAN), logits(model, LEAN.but(stacked_weights=False)))
        kernels = []
        for options in (LEAN, LEAN.but(stacked_weights=False)):
            with model.session(n_ctx=256, graph=options) as s:
                kernels.append(s.graph(1).stats()["kernels"])
        assert kernels[0] < kernels[1]


def logits(model, options):
    with model.session(n_ctx=256, graph=options) as s:
        return np.concatenate([s.decode(TEXT, logits="all"), *(s.decode([t]) for t in TEXT[:5]), s.decode(TEXT[:3], logits="all")])


@pytest.mark.parametrize("type", ["f32", "q8_0"])
@pytest.mark.parametrize("how", [{"legacy": True}, {"mtp": True}, {}], ids=["legacy", "mtp", "as it is"])
def test_one_product_is_the_same_to_the_bit(toys, type, how):
    with qwen3next_ggml.load(toys.file(type=type, **how), mmap=False, n_threads=1) as model:
        assert np.array_equal(logits(model, LEAN), logits(model, LEAN.but(stacked_weights=False)))


def test_parts_taken_for_each_other_show(toys):
    """The mutation of the test above, where two parts are of one size."""
    with qwen3next_ggml.load(toys.t0, mmap=False, n_threads=1) as model:
        right = logits(model, LEAN)
        at = model.weights.blk[1].ffn_gate_shexp
        model.weights.stacks[at] = replace(model.weights.stacks[at], cuts=model.weights.stacks[at].cuts[::-1])
        assert np.abs(logits(model, LEAN) - right).max() > 1e-2


def test_experts_that_lie_elsewhere_show(toys, monkeypatch):
    """Gate and up are told apart by where they lie in one tensor."""
    from qwen3next_ggml.tensors import storage

    pieces = storage._pieces
    with qwen3next_ggml.load(toys.t0, mmap=False, n_threads=1) as model:
        right = logits(model, LEAN)
    monkeypatch.setattr(storage, "_pieces", lambda tensor, memory: reversed(list(pieces(tensor, memory))))
    with qwen3next_ggml.load(toys.t0, mmap=False, n_threads=1) as model:
        assert np.abs(logits(model, LEAN) - right).max() > 1e-2


def test_a_weight_with_a_scale_is_multiplied_alone(toys, tmp_path):
    scales = {"blk.0.attn_gate.scale": np.full(1, 2.0), "blk.1.ffn_up_exps.scale": np.full(10, 0.5)}
    with qwen3next_ggml.load(changed(toys, tmp_path, add=scales), mmap=False, n_threads=1) as model:
        blk, stacks = model.weights.blk, model.weights.stacks
        assert blk[0].attn_qkv not in stacks and blk[1].ffn_gate_exps not in stacks and len(stacks) == 4 * 4 - 2
        assert np.array_equal(logits(model, LEAN), logits(model, LEAN.but(stacked_weights=False)))


def test_what_is_saved(toys):
    """Counted: in each layer two products or more of the mixer, the shared expert's, the router's, the experts'; none where weights are mapped."""
    for mmap, saved in ((False, 3 * 5 + 5), (True, 0)):
        with qwen3next_ggml.load(toys.t0, mmap=mmap) as model:
            kernels = []
            for options in (LEAN, LEAN.but(stacked_weights=False)):
                with model.session(n_ctx=256, graph=options) as s:
                    kernels.append(s.graph(1).stats()["kernels"])
            assert kernels[1] - kernels[0] == saved
