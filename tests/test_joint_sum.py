"""A layer's last sum as one op: the same numbers, patched or not, and nodes that are gone."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.graph import joint_sum
from qwen3next_ggml.graph.joint_sum import JointSum
from qwen3next_ggml.graph.options import LEAN

from .kit import nmse

# one op rounds a product and a sum together where two ops round each
SAME = 1e-10
APART = LEAN.but(joint_sum=False)
LAID = ["attn_residual", "ffn_moe_down", "ffn_moe_weights_norm", "ffn_shexp", "shared_expert_gate_sigmoid"]


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as loaded:
        yield loaded


def logits(model, options, patches=()):
    """Logits [5, n_vocab] of steps after a prompt, with the nodes named in `patches` halved in the steps."""
    with model.session(n_ctx=256, graph=options) as s:
        s.decode(list(range(1, 20)))
        if not patches:
            return np.concatenate([s.decode([token]) for token in range(30, 35)])
        with s.patch(patches[0], lambda g, x: g.scale(x, 0.5)):
            return np.concatenate([s.decode([token]) for token in range(30, 35)])


def test_the_same_from_fewer_nodes(model):
    assert nmse(logits(model, LEAN), logits(model, APART)) < SAME
    stats = []
    for options in (LEAN, APART):
        with model.session(n_ctx=256, graph=options) as s:
            stats.append(s.graph(1).stats())
    assert [stats[1][key] - stats[0][key] for key in ("kernels", "barriers")] == [3 * 4, 3 * 4]


@pytest.mark.parametrize("name", LAID)
@pytest.mark.parametrize("il", [1, 3])
def test_a_patched_value_counts(model, name, il):
    patched = logits(model, LEAN, [f"{name}-{il}"])
    assert np.array_equal(patched, logits(model, APART, [f"{name}-{il}"]))
    assert np.abs(patched - logits(model, LEAN)).max() > 1e-4


def test_a_patch_may_hold_on_to_a_value_for_a_later_layer(model):
    """Its place would have been taken by then."""
    held = {}

    def later(options):
        with model.session(n_ctx=256, graph=options) as s:
            s.decode(list(range(1, 20)))
            with s.patch("attn_residual-0", lambda g, x: held.setdefault(g, x)), s.patch("l_out-2", lambda g, x: g.add(x, held[g])):
                return s.decode([30])

    assert np.array_equal(later(LEAN), later(APART))


@pytest.mark.parametrize("name", LAID)
def test_laid_values_are_read_before_the_next_layer_takes_their_place(model, name):
    def values(options):
        with model.session(n_ctx=256, graph=options) as s, s.capture(f"{name}-*") as seen:
            s.decode(list(range(1, 20)))
            s.decode([30])
        return [seen[f"{name}-{il}"] for il in range(4)]

    laid = values(LEAN)
    assert all(nmse(a, b) < SAME for a, b in zip(laid, values(APART), strict=True)) and not np.array_equal(laid[0], laid[1])


def test_a_value_laid_in_the_wrong_row_shows(model, monkeypatch):
    right = logits(model, LEAN)
    monkeypatch.setitem(joint_sum.PLACES, "ffn_shexp", ("rows", 1))
    assert np.abs(logits(model, LEAN) - right).max() > 1e-3


def test_where_several_ops_are_needed(model):
    class Nothing:
        options, is_patched = LEAN, False

    hp, wb = model.hparams, model.weights.blk[0]
    assert JointSum.of(Nothing, hp, wb, 2) is None
    assert JointSum.of(Nothing, replace(hp, expert_weights_scale=2.0), wb, 1) is None
    Nothing.options = LEAN.but(expert_sum=False)
    assert JointSum.of(Nothing, hp, wb, 1) is None
    cpu, gpu = (SimpleNamespace(kind=kind) for kind in ("cpu", "gpu"))
    assert [LEAN.for_session("f16", 1, devices).joint_sum for devices in ([cpu], [gpu], [cpu, cpu])] == [True, False, False]
