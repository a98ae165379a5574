"""Rows, cells and bytes beyond 16 and 31 bits give the right numbers, or are refused before anything is allocated."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import BackendError
from qwen3next_ggml.graph.own import Graph
from qwen3next_ggml.memory import hybrid
from tests.kit import max_abs, run_python

MANY = 70_000
N_CTX = 262_144


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.mark.parametrize("n", [65_535, 65_536, MANY])
def test_norms_of_many_rows(n, rng):
    x = rng.standard_normal((n, 1, 4), np.float32)
    with Graph() as g:
        got = g.compute(g.rms_norm(g.tensor(x), 1e-6)).reshape(x.shape)
    assert max_abs(got, x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-6)) < 1e-5


def test_many_rows_looked_up(rng):
    x, at = rng.standard_normal((MANY, 8), np.float32), rng.permutation(MANY).astype(np.int32)
    with Graph() as g:
        assert np.array_equal(g.compute(g.get_rows(g.tensor(x), g.tensor(at, dtype="i32"))), x[at])


def test_many_cells_of_a_cache_converted(rng):
    """A view of each head over all cells, as attention without the fused op reads K."""
    x = rng.standard_normal((MANY, 2, 16)).astype(np.float16)
    with Graph() as g:
        k = g.tensor(x, dtype="f16")
        _, nb1, nb2, _ = k.nb
        heads = g.view_3d(k, 16, MANY, 2, nb2, nb1, 0)
        assert np.array_equal(g.compute(g.cont(g.cast(heads, qwen3next_ggml.ggml.types.F32))), x.swapaxes(0, 1).astype(np.float32))


def test_more_picks_of_experts_than_16_bits_count(rng):
    n_used, n_tokens, n_expert = 8, 8200, 16
    w, x = rng.standard_normal((n_expert, 4, 32), np.float32), rng.standard_normal((n_tokens, 1, 32), np.float32)
    ids = np.argsort(rng.random((n_tokens, n_expert)), axis=1)[:, :n_used].astype(np.int32)
    with Graph() as g:
        got = g.compute(g.mul_mat_id(g.tensor(w), g.tensor(x), g.tensor(ids, dtype="i32")))
    assert n_used * n_tokens > 65_535
    assert max_abs(got, np.einsum("tuok,tk->tuo", w[ids].astype(np.float64), x[:, 0])) < 1e-4


COPY = """
import numpy as np
from qwen3next_ggml import ggml
from qwen3next_ggml.ggml import types
backend = ggml.device("CPU").init()
context = ggml.Context(4, graph_size=4)
g = ggml.Ops(context)
x = g.set_input(context.new_tensor(types.F16, 1024, 2**20 + 1))
y = g.set_output(g.dup(x))
graph = ggml.Graph(context, 4)
graph.expand(y)
assert y.nbytes > 2**31
with ggml.GraphAllocator([backend.device.buffer_type()]) as allocator:
    allocator.alloc(graph)
    for offset in (0, 2**31 - 8, 2**31, y.nbytes - 8):
        x.set(np.frombuffer(offset.to_bytes(8, "little"), np.uint8), offset)
    backend.compute(graph)
    for offset in (0, 2**31 - 8, 2**31, y.nbytes - 8):
        assert int.from_bytes(y.raw(offset, 8).tobytes(), "little") == offset, offset
"""


def test_more_bytes_copied_than_31_bits_count():
    done = run_python(COPY)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_step_over_more_cells_than_16_bits_count(model, flash_attn):
    """Of n cells of zeros and a new one attention is v·eˢ / (n + eˢ): its reciprocal grows by the same for every cell."""
    taken = {}
    for n, n_ctx in ((50, 256), (200, 256), (MANY, N_CTX)):
        with model.session(n_ctx=n_ctx, flash_attn=flash_attn) as s:
            cells = np.arange(n)
            s.memory.kv.occupy(cells, cells, [0], np.ones((1, n), bool), np.zeros(n, bool))
            s.memory.resume(0, n, {n: {at: np.zeros(state.spec.n_embd, np.float32) for at, state in s.memory.recurrent.states.items()}})
            with s.capture("attn_pregate-3") as t:
                assert np.isfinite(s.decode([5])).all()
            taken[n] = 1 / np.abs(t["attn_pregate-3"]).max()
    a_cell = (taken[200] - taken[50]) / 150
    assert taken[MANY] == pytest.approx(taken[50] + (MANY - 50) * a_cell, rel=0.02)
    # what a count of 16 bits would give is far off
    assert taken[MANY] != pytest.approx(taken[50] + (MANY % 65_536 - 50) * a_cell, rel=1)


def test_a_long_context_is_taken_or_refused_with_its_size(model, monkeypatch):
    with model.session(n_ctx=N_CTX) as s:
        assert np.isfinite(s.decode([1, 2, 3])).all()
    allocated = []
    monkeypatch.setattr(hybrid, "available_memory", lambda device: 1 << 20)
    monkeypatch.setattr(hybrid.ggml, "alloc_tensors", lambda *args: allocated.append(args))
    with pytest.raises(BackendError, match=r"^n_ctx=262144 needs \d+ MiB of state on CPU, 1 MiB are available$"):
        model.session(n_ctx=N_CTX)
    assert not allocated
