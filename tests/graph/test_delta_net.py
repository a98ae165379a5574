"""The three forms of the delta rule as blocks, with scalar and per-channel gates, against the float64 step."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import GraphError
from qwen3next_ggml.ggml import types
from qwen3next_ggml.graph.builder import GraphBuilder
from qwen3next_ggml.graph.delta_net import delta_net
from qwen3next_ggml.graph.options import GraphOptions
from qwen3next_ggml.reference import kit
from tests.kit import nmse

S, H = 32, 6
NODES = 4096


def inputs(T, n_seqs, *, per_channel, n_k=H, decay=0.3):
    """Return q, k, v, gate, beta and state as float32 in numpy order: [n_seqs, T, heads, channels], state [n_seqs, H, S_v, S_k]."""
    r = np.random.default_rng(T)
    q, k = (kit.l2_norm(r.normal(size=(n_seqs, T, n_k, S)), 1e-6) for _ in range(2))
    v, beta = r.normal(size=(n_seqs, T, H, S)), r.uniform(size=(n_seqs, T, H, 1))
    gate = -r.exponential(decay, size=(n_seqs, T, H, S if per_channel else 1))
    return [np.float32(x) for x in (q, k, v, gate, beta, r.normal(size=(n_seqs, H, S, S)))]


def run(form, arrays, kept=None):
    """Build and compute the block; returns out [n_seqs, T, H, S_v] and the kept states [m, n_seqs, H, S_v, S_k], newest first."""
    with ggml.Context(NODES, graph_size=NODES) as ctx, ggml.device("CPU").init() as backend:
        graph = ggml.Graph(ctx, NODES)
        g = GraphBuilder(ctx, graph, GraphOptions(delta_net=form))
        tensors = [g.input(f"in{i}", types.F32, *x.shape[::-1]) for i, x in enumerate(arrays)]
        out, states = delta_net(g, *tensors, 0, kept=kept)
        results = [g.cont(x) for x in (out, *states)]
        for x in results:
            g.set_output(x)
            graph.expand(x)
        with ggml.GraphAllocator([backend.device.buffer_type()]) as allocator:
            allocator.alloc(graph)
            for tensor, x in zip(tensors, arrays):
                tensor.set(x)
            backend.compute(graph)
            out, *states = (x.get() for x in results)
            shape = arrays[5].shape
            return out.reshape(arrays[2].shape), np.concatenate([x.reshape(-1, *shape) for x in states])


def walk(arrays, *, pairing="tiled", step=kit.delta_step):
    """Return out and the state after each token [T, n_seqs, H, S_v, S_k] of the float64 step."""
    q, k, v, gate, beta, state = (x.astype(np.float64) for x in arrays)
    outs, states = [], []
    for i in range(len(q)):
        s, rows, after = state[i], [], []
        for t in range(q.shape[1]):
            g = gate[i, t] if gate.shape[-1] > 1 else gate[i, t, :, 0]
            q_t, k_t = (kit.pair_heads(x[i, t], H, pairing) for x in (q, k))
            out, s = step(s, q_t, k_t, v[i, t], g, beta[i, t, :, 0])
            rows.append(out)
            after.append(s)
        outs.append(rows)
        states.append(after)
    return np.array(outs), np.array(states).swapaxes(0, 1)


def distance(got, want):
    """Return the NMSE of the output and of the last state."""
    return nmse(got[0], want[0]), nmse(got[1], want[1][-1:])


@pytest.mark.parametrize("n_seqs", [1, 3])
@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "per-channel"])
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("form", ["fused", "chunked"])
def test_equals_the_walk(form, T, per_channel, n_seqs):
    arrays = inputs(T, n_seqs, per_channel=per_channel)
    assert max(distance(run(form, arrays), walk(arrays))) < 1e-10


@pytest.mark.parametrize("n_seqs", [1, 3])
@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "per-channel"])
@pytest.mark.parametrize("kept", [(7,), (7, 6, 5), (7, 5, 2), (7, 6, 5, 4, 3, 2, 1), (70, 69), (70, 64, 63, 1)], ids=str)
@pytest.mark.parametrize("form", ["fused", "chunked"])
def test_kept_states(form, kept, per_channel, n_seqs):
    arrays = inputs(max(kept), n_seqs, per_channel=per_channel)
    out, states = run(form, arrays, kept)
    want_out, want_states = walk(arrays)
    assert nmse(out, want_out) < 1e-10
    assert nmse(states, want_states[[t - 1 for t in kept]]) < 1e-10


@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "per-channel"])
@pytest.mark.parametrize("form", ["fused", "chunked"])
def test_strong_decay_stays_finite(form, per_channel):
    """A chunk's running gate reaches −1300: e^G vanishes and e^−G would be infinite."""
    arrays = inputs(130, 1, per_channel=per_channel, decay=20.0)
    assert max(distance(run(form, arrays), walk(arrays))) < 1e-7


def decay_on_the_value_axis(state, q, k, v, g, beta):
    return kit.delta_step(state * np.exp(g)[:, :, None], q, k, v, np.zeros_like(g), beta)


@pytest.mark.parametrize("T", [1, 17])
@pytest.mark.parametrize("form", ["fused", "chunked"])
def test_decay_on_the_wrong_axis_is_seen(form, T):
    arrays = inputs(T, 1, per_channel=True)
    assert min(distance(run(form, arrays), walk(arrays, step=decay_on_the_value_axis))) > 1e-3


def test_fused_form_tiles_key_heads():
    arrays = inputs(5, 2, per_channel=False, n_k=2)
    got = run("fused", arrays)[0]
    assert nmse(got, walk(arrays)[0]) < 1e-10
    assert nmse(got, walk(arrays, pairing="interleaved")[0]) > 1e-2


@pytest.mark.parametrize("form", ["fused", "chunked"])
@pytest.mark.parametrize("which, shape", [(1, (1, 4, H, S)), (2, (1, 5, H, S)), (3, (1, 4, 2, 1)), (4, (1, 4, H, S)), (5, (2, H, S, S))])
def test_wrong_shapes_are_refused(form, which, shape):
    arrays = inputs(4, 1, per_channel=False)
    arrays[which] = np.zeros(shape, np.float32)
    if which == 1:
        arrays[0] = arrays[0][:, :3]
    with pytest.raises(GraphError, match="delta net in layer 0: expected shape"):
        run(form, arrays)
