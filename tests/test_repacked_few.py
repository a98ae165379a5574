"""Weights held twice: rewritten ones for few columns, stored ones for many, and the same numbers but for the order of sums."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import ggml
from qwen3next_ggml.ggml import types
from qwen3next_ggml.graph.linear import FEW_COLUMNS
from qwen3next_ggml.graph.options import LEAN, PLAIN
from qwen3next_ggml.tensors import policy

from .kit.distance import nmse
from .kit.gguf_bytes import edit_gguf

TOKENS = [i % 104 for i in range(FEW_COLUMNS + 1)]


@pytest.fixture
def model(toys, monkeypatch):
    """A model whose weights are held twice over every provider, whether that is faster there or not."""
    monkeypatch.setattr(policy, "_tiled", lambda version, features: policy.TILED)
    with qwen3next_ggml.load(toys.file(type="q4_k", geometry="tiny-q", n_vocab=104), n_threads=1) as loaded:
        assert len(loaded.weights.repacked) == 29
        yield loaded


def logits(model, n, options=LEAN):
    """The last logits [n_vocab] after n tokens at once."""
    with model.session(n_ctx=256, graph=options) as s:
        return s.decode(TOKENS[:n])[0]


@pytest.mark.parametrize("n", [1, 2, 5, FEW_COLUMNS])
def test_each_product_is_that_of_the_stored_weight(model, n):
    x = np.random.default_rng(0).standard_normal((n, 2048)).astype(np.float32)
    device = ggml.device("CPU")
    with ggml.Context(200, graph_size=100) as ctx, device.init() as backend:
        g, graph, columns = ggml.Ops(ctx), ggml.Graph(ctx, 100), {}
        pairs = list(model.weights.repacked.items())
        for stored, rewritten in pairs:
            n_in = stored.ne[0]
            given = columns.setdefault(n_in, ctx.new_tensor(types.F32, n_in, n))
            graph.expand(g.set_output(g.mul_mat(stored, given)))
            graph.expand(g.set_output(g.mul_mat(rewritten, given)))
        with ggml.alloc_tensors(ctx, device.buffer_type()):
            for n_in, given in columns.items():
                given.set(np.ascontiguousarray(x[:, :n_in]))
            backend.compute(graph)
            products = [node.get() for node in graph.nodes]
    assert len(products) == 2 * len(pairs)
    assert all(nmse(rewritten, stored) < 1e-11 for stored, rewritten in zip(products[::2], products[1::2]))


@pytest.mark.parametrize("n", [1, 2, 5, FEW_COLUMNS, FEW_COLUMNS + 1])
def test_the_logits_are_those_of_stored_weights(model, n):
    """As near as it leaves them that a difference in the last bit meets a rounding to eight bits in the next layer."""
    assert nmse(logits(model, n), logits(model, n, LEAN.but(repacked_few=False))) < 1e-3


@pytest.mark.parametrize("name", ["ssm_out", "ffn_gate_shexp"])
def test_few_columns_meet_rewritten_weights_and_many_stored_ones(model, name):
    """Told apart by rewritten weights that are another layer's; `ffn_gate_shexp` is part of a stack where there is one column."""
    counts = (1, 2, FEW_COLUMNS, FEW_COLUMNS + 1)
    few, plain = [logits(model, n) for n in counts], [logits(model, n, PLAIN) for n in counts]
    repacked, weights = model.weights.repacked, [getattr(model.weights.blk[il], name) for il in (0, 1)]
    for weight, other in zip(weights, [repacked[weight] for weight in reversed(weights)]):
        repacked[weight] = other
    changed = [np.abs(logits(model, n) - before).max() for n, before in zip(counts, few)]
    assert min(changed[:3]) > 1e-2 and changed[3] == 0
    assert all(np.array_equal(logits(model, n, PLAIN), before) for n, before in zip(counts, plain))


def test_a_scale_stays_with_its_weight(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "_tiled", lambda version, features: policy.TILED)
    scales = {"blk.0.ssm_out.scale": np.full(1, 2.0), "blk.1.ffn_up_shexp.scale": np.full(1, 0.5)}
    edit_gguf(toys.file(type="q4_k", geometry="tiny-q", n_vocab=104), tmp_path / "scaled.gguf", add=scales)
    with qwen3next_ggml.load(tmp_path / "scaled.gguf", n_threads=1) as scaled:
        assert scaled.weights.repacked[scaled.weights.blk[1].ffn_gate_shexp] not in scaled.weights.stacks
        assert nmse(logits(scaled, 1), logits(scaled, 1, LEAN.but(repacked_few=False))) < 1e-6
