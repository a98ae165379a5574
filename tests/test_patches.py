"""What patches are for: heads zeroed, an expert barred, two experts swapped, a direction added; on any weights, each against float64."""

import gc
import weakref
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest

import qwen3next_ggml as q
from tests.kit import max_abs, nmse, reference_of

TOKENS = np.random.default_rng(11).integers(0, 97, 24).tolist()
F32 = dict(n_ctx=256, type_k="f32", type_v="f32", flash_attn=False)
N_HEAD, N_EXPERT = 8, 10
FILES = {"f32": {}, "q8_0": dict(type="q8_0"), "q4_k": dict(type="q4_k", geometry="tiny-q")}
WHERE = list(product(FILES, ("plain", "lean")))


@pytest.fixture(scope="module")
def models(toys):
    loaded = {name: q.load(toys.file(**how), n_threads=1) for name, how in FILES.items()}
    yield loaded
    for model in loaded.values():
        model.close()


def run(model, graph, *patch):
    with model.session(**F32, n_ubatch=16, graph=graph) as s, s.patch(*patch) if patch else nullcontext():
        return s.decode(TOKENS, logits="all")


def reference(path, name, change):
    """The float64 model in which `change` is made to the value `name` of one layer, "name-il"."""
    model, (name, il) = reference_of(path), name.rsplit("-", 1)
    plain = model._block

    def block(x, layer, state, note):
        return plain(x, layer, state, lambda n, value: note(n, change(value) if (n, layer) == (name, int(il)) else value))

    model._block = block
    return model.decode(TOKENS)


def check(models, toys, kind, name, fn, change, graph):
    path = toys.file(**FILES[kind])
    got, want, plain = run(models[kind], graph, name, fn), reference(path, name, change), reference(path, name, lambda value: value)
    if kind == "f32":
        assert max_abs(got, want) < 1e-4 and max_abs(got, plain) > 1e-2
    else:
        assert models[kind].weights.blk[1].attn_qkv.type.name == kind
        # products of quantised weights round the activations to 8 bits, which float64 does not
        rounding = nmse(run(models[kind], graph), plain)
        assert nmse(got, want) < 2 * rounding and nmse(got, plain) > 3 * nmse(got, want)


@pytest.mark.parametrize("kind, graph", WHERE)
def test_heads_are_zeroed(models, toys, kind, graph):
    width = models[kind].hparams.n_embd_head_k
    keep = np.ones(N_HEAD * width)
    keep[width : 5 * width] = 0
    check(models, toys, kind, "attn_pregate-3", lambda g, x: g.mul(x, g.input("keep", keep)), lambda x: x * keep, graph)


@pytest.mark.parametrize("kind, graph", WHERE)
def test_an_expert_is_barred(models, toys, kind, graph):
    bar = np.where(np.arange(N_EXPERT) == 4, -1e4, 0.0)
    check(models, toys, kind, "ffn_moe_logits-1", lambda g, x: g.add(x, g.input("bar", bar)), lambda x: x + bar, graph)


@pytest.mark.parametrize("kind, graph", WHERE)
def test_two_experts_are_swapped(models, toys, kind, graph):
    order = np.arange(N_EXPERT)
    order[[1, 7]] = 7, 1
    swap = np.eye(N_EXPERT)[order]
    check(models, toys, kind, "ffn_moe_logits-2", lambda g, x: g.mul_mat(g.input("swap", swap), x), lambda x: x[order], graph)


@pytest.mark.parametrize("kind, graph", WHERE)
def test_a_direction_is_added(models, toys, kind, graph):
    direction = np.random.default_rng(2).normal(size=models[kind].hparams.n_embd)
    check(models, toys, kind, "l_out-1", lambda g, x: g.add(x, g.input("direction", direction)), lambda x: x + direction, graph)


@pytest.mark.parametrize("fails", [False, True])
def test_a_patched_graph_dies_with_its_block(models, fails):
    """Nor is anything kept that the patch's function holds."""
    class Holder:
        scale = 0.5

    holder = Holder()
    gone = weakref.ref(holder)
    with models["f32"].session(**F32) as s:
        want = s.decode(TOKENS[:3])
        try:
            with s.patch("l_out-0", lambda g, x, holder=holder: g.scale(x, holder.scale)), s.capture("l_out-0"):
                s.decode(TOKENS[3:5])
                s.decode(TOKENS[5:6])
                assert any(key.patches for key in s.graphs._graphs)
                if fails:
                    raise RuntimeError
        except RuntimeError:
            pass
        assert not any(key.patches or key.captures for key in s.graphs._graphs)
        assert s.probes.key(s.probes.base) == s.probes.base
        del holder
        gc.collect()
        assert gone() is None
        s.clear()
        assert np.array_equal(s.decode(TOKENS[:3]), want)
