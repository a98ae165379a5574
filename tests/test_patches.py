"""What patches are for: a head zeroed, an expert barred, two experts swapped, each against float64."""

import numpy as np
import pytest

import qwen3next_ggml as q
from tests.kit import max_abs, reference_of

TOKENS = np.random.default_rng(11).integers(0, 97, 24).tolist()
F32 = dict(n_ctx=256, type_k="f32", type_v="f32", flash_attn=False)
HEAD_DIM, N_HEAD, N_EXPERT = 24, 8, 10


@pytest.fixture(scope="module")
def model(toys):
    with q.load(toys.t0, n_threads=1) as model:
        yield model


def patched(model, name, fn, graph):
    with model.session(**F32, n_ubatch=16, graph=graph) as s, s.patch(name, fn):
        return s.decode(TOKENS, logits="all")


def reference(path, name, change):
    """The float64 model in which `change` is made to the value `name` of one layer, "name-il"."""
    model, (name, il) = reference_of(path), name.rsplit("-", 1)
    plain = model._block

    def block(x, layer, state, note):
        return plain(x, layer, state, lambda n, value: note(n, change(value) if (n, layer) == (name, int(il)) else value))

    model._block = block
    return model.decode(TOKENS)


def check(model, toys, name, fn, change, graph):
    got, plain = patched(model, name, fn, graph), reference(toys.t0, name, lambda value: value)
    assert max_abs(got, reference(toys.t0, name, change)) < 1e-4
    assert max_abs(got, plain) > 1e-2


@pytest.mark.parametrize("graph", ["plain", "lean"])
def test_a_head_is_zeroed(model, toys, graph):
    keep = np.ones(N_HEAD * HEAD_DIM)
    keep[2 * HEAD_DIM : 3 * HEAD_DIM] = 0
    check(model, toys, "attn_pregate-3", lambda g, x: g.mul(x, g.input("keep", keep)), lambda x: x * keep, graph)


@pytest.mark.parametrize("graph", ["plain", "lean"])
def test_an_expert_is_barred(model, toys, graph):
    bar = np.where(np.arange(N_EXPERT) == 4, -1e4, 0.0)
    check(model, toys, "ffn_moe_logits-1", lambda g, x: g.add(x, g.input("bar", bar)), lambda x: x + bar, graph)


@pytest.mark.parametrize("graph", ["plain", "lean"])
def test_two_experts_are_swapped(model, toys, graph):
    order = np.arange(N_EXPERT)
    order[[1, 7]] = 7, 1
    check(model, toys, "ffn_moe_logits-2", lambda g, x: g.mul_mat(g.input("swap", np.eye(N_EXPERT)[order]), x), lambda x: x[order], graph)
