"""Every value that has a name, on every path, against float64: all of a graph at once, and each by itself through `capture` (C51)."""

from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import graph_cache
from qwen3next_ggml.graph import attention, delta_net
from qwen3next_ggml.graph.builder import GraphBuilder
from qwen3next_ggml.models import qwen3next
from qwen3next_ggml.parity.compare import BY_EXPERT
from qwen3next_ggml.parity.recording import is_named
from qwen3next_ggml.reference import STATES, ubatch_values
from tests.kit import max_abs, reference_of

TOLERANCE = 1e-4
# llama.cpp's own graph hands an F32 cache to flash attention through F16, which shows in all that follows
TOLERANCE_F16_CACHE = 5e-3
N_KV = 256
TOKENS = np.random.default_rng(9).integers(0, 97, 150).tolist()
DELTA_NETS, GRAPHS, FLASH = ("fused", "chunked", "autoregressive"), ("plain", "lean"), (True, False)
PATHS = list(product(DELTA_NETS, GRAPHS, FLASH))
LINEAR, FULL = (0, 1, 2), (3,)

# named values that are compared with nothing: none of the plain graph. The lean graph of a prompt pairs heads inside the op, so the
# key heads that go in are not repeated; asked for by name they are, see below
NOT_COMPARED = {"plain": set(), "lean": {f"{x}_conv_predelta-{il}" for x in "qk" for il in LINEAR}}
# names of the walk without a node of their own: one that is named again keeps the later name, and llama.cpp has none for beta
RENAMED = {*(f"post_moe-{il}" for il in range(4)), *(f"{name}-{il}" for name in ("v_conv", "beta") for il in LINEAR)}
RENAMED_BY_FORM = {
    "fused": set(), "chunked": {f"{x}_conv_predelta-{il}" for x in "kv" for il in LINEAR},
    "autoregressive": {f"{name}-{il}" for name in ("k_conv_predelta", "v_conv_predelta", "dnet_add_ar_state") for il in LINEAR},
}  # fmt: skip
# of attention in one op no parts are seen
PARTS = {f"{name}-{il}" for name in ("kq", "kq_soft_max", "kqv") for il in FULL}


def options(delta_net="fused", graph="plain", flash_attn=False):
    return dict(n_ctx=N_KV, type_k="f32", type_v="f32", delta_net=delta_net, graph=graph, flash_attn=flash_attn)


class Truth:
    """What each ubatch should name: the walk's values of its tokens, what follows from the cut, and the inputs."""

    def __init__(self, path, delta_net, cut):
        model, start, self.ubatches = reference_of(path), 0, []
        for n in cut:
            trace = {}
            model.decode(TOKENS[start : start + n], trace=trace)
            trace |= ubatch_values(model, trace, n_kv=N_KV, delta_net=delta_net)
            self.ubatches.append(trace | inputs(start, n, model.hp))
            start += n


def inputs(start, n, hp):
    """What a session that holds one sequence feeds a graph; cells and slots are taken from the first one on."""
    at = np.arange(start, start + n)
    cells, elements = at[:, None], np.arange(hp.n_head_kv * hp.n_embd_head_k)
    mask = np.where(np.arange(N_KV) <= cells, 0, -np.inf)
    return {
        "inp_tokens": np.array(TOKENS[start : start + n]), "inp_pos": at, "out_ids": np.arange(n), "attn_inp_kq_mask": mask,
        "attn_inp_k_idxs": at, "attn_inp_v_idxs": at, "attn_inp_v_idxs (transposed)": elements * N_KV + cells, "rs_s_copy": np.zeros(1),
        "l2_norm_scale": np.full(hp.ssm_d_state, hp.ssm_d_state**-0.5),
    }  # fmt: skip


@pytest.fixture(scope="module")
def truth(toys):
    return cache(lambda delta_net, cut: Truth(toys.t0, delta_net, cut).ubatches)


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def key_of(name, occurrence, last):
    """A name as the reference spells it."""
    return name if occurrence == last[name] else f"{name}#{occurrence}"


def record(session, n):
    """Decode `n` more tokens with every node captured, whatever the options leave of them → name → value, in the order of the graph."""
    start = session.n_past()
    [values] = session.debug_capture({0: TOKENS[start : start + n]}, logits="all")[1]
    last = {}
    for name, occurrence in values:
        last[name] = max(occurrence, last.get(name, 0))
    return {key_of(*at, last): value for at, (_, _, value) in values.items() if is_named(at[0])}


def distance(name, got, want, mine, theirs):
    """How far a value is off, relative to what is above 1 in it; NaN where the extent differs.

    Experts are a set, and what is per expert goes in the order of its ids.
    """
    base, _, layer = name.partition("#")[0].rpartition("-")
    got, want = np.asarray(got, np.float64).ravel(), want[name].astype(np.float64).ravel()
    if got.size != want.size:
        return np.nan
    if base == "ffn_moe_topk" or base in BY_EXPERT:
        got, want = (by_expert(x, ids[f"ffn_moe_topk-{layer}"], base) for x, ids in ((got, mine), (want, theirs)))
    return max_abs(got, want) / max(1.0, np.abs(want[np.isfinite(want)]).max(initial=0.0))


def by_expert(x, ids, base):
    n_used = 3
    ids = np.asarray(ids, np.int64).reshape(-1, n_used)
    x = np.sort(ids) if base == "ffn_moe_topk" else np.take_along_axis(x.reshape(*ids.shape, -1), np.argsort(ids)[..., None], axis=1)
    return x.ravel()


def distances(got, want):
    """Return name → how far each value is off, in the order of the graph; names that only the graph has are off by NaN."""
    found = {}
    for name, value in got.items():
        # a transposed V cache takes every element as a row of its own
        spelled = f"{name} (transposed)" if name == "attn_inp_v_idxs" and np.size(value) > want[name].size else name
        found[name] = distance(spelled, value, want, got, want) if spelled in want else np.nan
    return found


def too_far(found, *, f16_cache=False):
    seen, tolerance = {}, TOLERANCE
    for name, off in found.items():
        if f16_cache and name == "attn_pregate-3":
            tolerance = TOLERANCE_F16_CACHE
        if not off < tolerance:
            seen[name] = off
    return seen


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_every_named_value(model, truth, delta_net, graph, flash_attn):
    """Two ubatches, of two chunks and of one, then one token: nothing that has a name is left out."""
    cut = (1,) * 5 if delta_net == "autoregressive" else (100, 49, 1)
    # one token has no chunks
    forms = ["autoregressive" if delta_net == "chunked" and n == 1 else delta_net for n in cut]
    with model.session(**options(delta_net, graph, flash_attn)) as s:
        for n, form, i in zip(cut, forms, range(len(cut))):
            want = truth(form, cut)[i]
            got = record(s, n)
            found = distances(got, want)
            unlike = {name for name, off in found.items() if np.isnan(off)}
            assert unlike <= NOT_COMPARED[graph]
            compared = {name: off for name, off in found.items() if name not in unlike}
            assert too_far(compared, f16_cache=(graph, flash_attn) == ("plain", True)) == {}, f"ubatch {i}"
            if graph == "plain":
                lacking = RENAMED | RENAMED_BY_FORM[form] | (PARTS if flash_attn else set())
                assert want.keys() - got.keys() - {"l2_norm_scale", "attn_inp_v_idxs (transposed)"} == lacking


@pytest.mark.parametrize("delta_net, graph, flash_attn", [*product(DELTA_NETS, ("lean",), (False,)), ("fused", "lean", True), ("fused", "plain", False)])
def test_every_name_by_itself(model, truth, delta_net, graph, flash_attn):
    """Captured alone, so that nothing but the options that hide it are off; views and overwritten nodes among them.

    Of the unfused forms those that the fused one has not.
    """
    n = 1 if delta_net == "autoregressive" else 70
    want = truth(delta_net, (n,))[0]
    with model.session(**options(delta_net, "plain", flash_attn)) as s, model.session(**options("fused", "plain", flash_attn)) as fused:
        names, known = list(record(s, n)), record(fused, n) if delta_net != "fused" else ()
    parts = {name: name.rpartition("-") for name in names if name not in known}
    patterns = dict.fromkeys(f"{base}-*" if layer[:1].isdigit() else name for name, (base, _, layer) in parts.items())
    assert len(patterns) > {"fused": 55, "chunked": 17, "autoregressive": 4}[delta_net]
    with model.session(**options(delta_net, graph, flash_attn)) as s:
        for pattern in patterns:
            s.clear()
            # the order of what is per expert
            with s.capture(pattern, "ffn_moe_topk-*") as t:
                s.decode(TOKENS[:n], logits="all")
            got = {name: t[name] for name in names if fnmatchcase(name, pattern) or name.startswith("ffn_moe_topk")}
            assert too_far(distances(got, want)) == {}


def swapped_heads(monkeypatch):
    pair_heads = delta_net.pair_heads
    monkeypatch.setattr(qwen3next, "pair_heads", lambda g, x, H_v, pairing: pair_heads(g, x, H_v, "tiled"))


def transposed_decay(monkeypatch):
    """D_ij = exp(G_j − G_i): within a chunk what is older counts for more."""
    sub = GraphBuilder.sub
    monkeypatch.setattr(GraphBuilder, "sub", lambda g, a, b: sub(g, a, b) if b.ne[1] > 1 or a.ne[0] != a.ne[1] else g.neg(sub(g, a, b)))


def unmasked_attention(monkeypatch):
    monkeypatch.setattr(GraphBuilder, "soft_max_ext", lambda g, x, mask, scale, bias: g.soft_max(g.scale(x, scale)))


def rotated_whole_heads(monkeypatch):
    rope = attention.rope
    monkeypatch.setattr(attention, "rope", lambda g, hp, x, pos: g.neg(rope(g, hp, x, pos)))


MUTATIONS = {swapped_heads: ("fused", "q_conv_predelta-0"), transposed_decay: ("chunked", "decay_mask-0"),
             unmasked_attention: ("fused", "kq_soft_max-3"), rotated_whole_heads: ("fused", "Qcur-3")}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_first_miss_names_the_bug(model, truth, monkeypatch, mutation):
    mutation(monkeypatch)
    form, name = MUTATIONS[mutation]
    with model.session(**options(form)) as s:
        assert next(iter(too_far(distances(record(s, 70), truth(form, (70,))[0])))) == name


def test_a_value_read_too_late_is_seen(model, truth, monkeypatch):
    """Without their copies, views and overwritten nodes hold something else by the end of the graph."""
    capture = graph_cache.capture

    def without_copies(g, graph, wanted):
        view = SimpleNamespace(context=g.context, inputs=g.inputs, set_output=g.set_output, cont=lambda x: x)
        return capture(view, graph, wanted)

    monkeypatch.setattr(graph_cache, "capture", without_copies)
    with model.session(**options("chunked")) as s:
        missed = too_far(distances(record(s, 70), truth("chunked", (70,))[0]))
    assert {"v_b-0", "conv_state_update-0"} <= missed.keys()


def test_states_are_known_to_be_states(truth):
    assert {name.rpartition("-")[0] for name, x in truth("fused", (100, 49, 1))[0].items() if len(x) != 100} >= set(STATES)
