"""Parity: equal runs are equal, and a bug put into the graph on purpose is named at the node it was put into.

Each bug runs in this process, where it can be put in; the reference is float64, or llama.cpp's graph without the bug.
"""

from dataclasses import replace

import numpy as np
import pytest

from qwen3next_ggml.errors import BackendError, OptionError, StateError
from qwen3next_ggml.graph import attention, delta_net, ffn
from qwen3next_ggml.graph.builder import GraphBuilder
from qwen3next_ggml.graph.state import RecurrentState
from qwen3next_ggml.models import qwen3next
from qwen3next_ggml.parity import FLOAT64, LLAMA, Recording, Run, Value, compare, record, record_apart, reference_of
from qwen3next_ggml.parity.pairs import variants
from qwen3next_ggml.parity.recording import merge
from tests.kit import run_python

TOKENS = tuple(np.random.default_rng(9).integers(0, 97, 12).tolist())


@pytest.fixture(scope="module")
def run(toys):
    """A run over the toy with the graph llama.cpp builds, attention in parts so that nothing is rounded to float16."""
    return Run(path=str(toys.t0), tokens=TOKENS, graph="plain", flash_attn="off", n_threads=1)


@pytest.fixture(scope="module")
def truth(run):
    return record(replace(run, kind=FLOAT64))


# --- equal sides ---


@pytest.mark.parametrize("how", [
    dict(graph="plain"), dict(graph="lean"), dict(delta_net="chunked"), dict(delta_net="autoregressive", graph="lean"),
    dict(n_ubatch=1), dict(n_ubatch=3), dict(n_ubatch=3, graph="lean", flash_attn="on"),
], ids=str)  # fmt: skip
def test_every_path_equals_float64(run, truth, how):
    found = compare(record(replace(run, **how)), truth)
    assert found.misses == [] and len(found.nodes) > 140
    assert {"result_output", "ffn_moe_topk-3", "Kcur-3"} <= {node.value.name for node in found.nodes}
    # a step of the lean graph leaves the new state where the old one was, under no name
    assert how.get("graph") == "lean" or "new_state-0" in {node.value.name for node in found.nodes}


@pytest.mark.parametrize("n_ubatch", [1, 3, 512])
def test_the_plain_graph_has_every_node_of_llama(run, n_ubatch):
    here = replace(run, n_ubatch=n_ubatch)
    found = compare(record(here), record_apart(replace(here, kind=LLAMA)))
    assert (found.misses, found.only_here, found.only_there, found.unlike) == ([], (), (), ())
    assert len(found.nodes) > 200


def test_experts_in_another_order_are_the_same(run, truth):
    """The lean graph picks with top_k, whose order is its own."""
    lean = record(replace(run, graph="lean"))
    theirs = {v.name: v for v in truth.values}
    assert any((v.array.ravel() != theirs[v.name].array.ravel()).any() for v in lean.values if v.name.startswith("ffn_moe_topk"))


# --- bugs ---


def decay_on_the_value_axis(monkeypatch):
    """Every value channel of the state decays at a pace of its own, as only a key channel may."""
    autoregressive = delta_net.autoregressive

    def transposed(g, q, k, v, gate, beta, state, il):
        S_v, H, _, n_seqs = v.ne
        pace = g.input("pace", np.linspace(-0.5, 0.5, S_v, dtype=np.float32))
        rows = g.repeat_4d(g.reshape_4d(gate, 1, 1, H, n_seqs), 1, S_v, H, n_seqs)
        return autoregressive(g, q, k, v, gate, beta, g.mul(state, g.exp(g.mul(rows, g.reshape_4d(pace, 1, S_v, 1, 1)))), il)

    monkeypatch.setattr(delta_net, "autoregressive", transposed)


def decay_transposed_in_a_chunk(monkeypatch):
    """D_ij = exp(G_j − G_i): within a chunk what is older counts for more."""
    exp = GraphBuilder.exp

    def transposed(g, x):
        return exp(g, g.neg(x)) if x.op == "TRI" else exp(g, x)

    monkeypatch.setattr(GraphBuilder, "exp", transposed)


def heads_paired_the_other_way(monkeypatch):
    pair_heads = delta_net.pair_heads
    monkeypatch.setattr(qwen3next, "pair_heads", lambda g, x, H_v, pairing: pair_heads(g, x, H_v, "tiled"))


def norm_weights_plus_one(monkeypatch):
    rms_norm = qwen3next.rms_norm

    def offset(g, x, weight, eps, il):
        # x·(w + 1) = x·w + x
        y = rms_norm(g, x, weight, eps, il)
        return g.add(y, g.rms_norm(x, eps))

    monkeypatch.setattr(qwen3next, "rms_norm", offset)


def rope_over_the_head_width(monkeypatch):
    rope = attention.rope
    monkeypatch.setattr(attention, "rope", lambda g, hp, x, pos: rope(g, replace(hp, n_rot=hp.n_embd_head_k), x, pos))


def state_not_written_back(monkeypatch):
    """The delta state of layer 1 stays what it was; its conv window is kept."""
    write = RecurrentState.write

    def nowhere(state, g, inp, new, *more):
        if (state.spec.il, state.spec.name) == (1, "s"):
            g.expand(new)
        else:
            write(state, g, inp, new, *more)

    monkeypatch.setattr(RecurrentState, "write", nowhere)


def expert_weights_not_renormalised(monkeypatch):
    monkeypatch.setattr(GraphBuilder, "div", lambda g, weights, total: g.scale(weights, 1.0))


def weights_of_the_experts_after_them(monkeypatch):
    """The picked experts are weighed with the probabilities of those one place further down."""
    get_rows = GraphBuilder.get_rows

    def shifted(g, a, ids):
        if a.ne[0] == 1 and ids.view_src is not None:
            ids = g.view_4d(ids.view_src, *ids.ne, *ids.nb[1:], ids.nb[0])
        return get_rows(g, a, ids)

    monkeypatch.setattr(GraphBuilder, "get_rows", shifted)


def weights_of_other_experts(monkeypatch):
    """The projections up are those of the experts one place further down."""
    linear_id = ffn.linear_id

    def shifted(g, w, x, ids):
        return linear_id(g, w, x, g.view_4d(ids.view_src, *ids.ne, *ids.nb[1:], ids.nb[0]) if "up_exps" in w.name else ids)

    monkeypatch.setattr(ffn, "linear_id", shifted)


# where each is first seen in the graph without the bug, and in float64, which has names for fewer nodes
BUGS = {
    decay_transposed_in_a_chunk: ("decay_mask-0", "attn_output-0", "graph/delta_net.py", dict(delta_net="chunked")),
    decay_on_the_value_axis: ("new_state-0", "attn_output-0", "graph/delta_net.py", dict(delta_net="autoregressive")),
    heads_paired_the_other_way: ("q_conv_predelta-0", "q_conv_predelta-0", "graph/delta_net.py", {}),
    norm_weights_plus_one: ("attn_norm-0", "attn_norm-0", "test_parity.py", {}),
    rope_over_the_head_width: ("Qcur-3", "Qcur-3", "graph/attention.py", {}),
    state_not_written_back: ("state_predelta-1", "state_predelta-1", "graph/delta_state.py", {}),
    weights_of_the_experts_after_them: ("ffn_moe_weights-0", "ffn_moe_weights-0", "graph/ffn.py", {}),
    weights_of_other_experts: ("ffn_moe_up-0", "ffn_moe_up-0", "graph/linear.py", {}),
    expert_weights_not_renormalised: ("ffn_moe_weights_norm-0", "ffn_moe_weights_norm-0", "test_parity.py", {}),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("ref", ["plain", "float64"])
def test_a_bug_is_named_at_its_node(run, truth, monkeypatch, bug, ref):
    in_plain, in_float64, file, how = BUGS[bug]
    here = replace(run, **how)
    reference = truth if ref == "float64" else record(here)
    assert compare(record(here), reference).first is None
    bug(monkeypatch)
    first = compare(record(here), reference).first
    assert first.value.name == (in_float64 if ref == "float64" else in_plain)
    assert file is None or first.value.line.rpartition(":")[0] == file
    assert first.nmse > 1e-4 and first.value.inputs


def test_a_difference_is_dated_by_the_ubatch_it_began_in(run, monkeypatch):
    """The skipped write shows in the second ubatch, in nodes of the first layer only after it."""
    reference = record(run)
    state_not_written_back(monkeypatch)
    found = compare(record(run), reference)
    assert {node.ubatch for node in found.misses} == {1}
    assert all(node.layer is None or node.layer >= 1 for node in found.misses)


# --- what a comparison sees ---


def recording(*values, tokens=(1, 2, 3), ubatches=(2, 1)):
    return Recording("by hand", tokens, ubatches, values)


def value(name, array, occurrence=0, how="tokens"):
    array = np.asarray(array)
    return Value(name, occurrence, "MUL", array.shape[::-1], how, array.astype(np.int32 if array.dtype.kind == "i" else np.float32))


X = np.random.default_rng(3).normal(size=(3, 4))


@pytest.mark.parametrize("ours, theirs, nmse, why", [
    (value("a-0", X), value("a-0", X), 0, ""),
    (value("a-0", 1.1 * X), value("a-0", X), 0.01, ""),
    (value("a-0", np.where(X > 0, X, np.nan)), value("a-0", X), np.inf, "NaN"),
    (value("mask", np.where(X > 0, 0, -np.inf)), value("mask", np.where(X > 0, 0, -np.inf)), 0, ""),
    (value("mask", np.where(X > 0, 0, -np.inf)), value("mask", np.where(X < 0, 0, -np.inf)), np.inf, "other places"),
    (value("ffn_moe_topk-0", [[3, 1], [0, 2], [5, 4]]), value("ffn_moe_topk-0", [[1, 3], [2, 0], [5, 4]]), 0, ""),
    (value("ffn_moe_topk-0", [[3, 1], [0, 2], [5, 4]]), value("ffn_moe_topk-0", [[1, 3], [2, 0], [5, 1]]), np.inf, "1 of 3 tokens"),
])  # fmt: skip
def test_kinds_of_difference(ours, theirs, nmse, why):
    [node] = compare(recording(ours), recording(theirs)).nodes
    assert node.nmse == pytest.approx(nmse, rel=1e-3) and why in node.why


def test_experts_are_aligned_before_they_are_compared():
    ids, order = np.array([[3, 1], [0, 2], [5, 4]]), [1, 0]
    ours = [value("ffn_moe_topk-0", ids), value("ffn_moe_down-0", X.reshape(3, 2, 2))]
    theirs = [value("ffn_moe_topk-0", ids[:, order]), value("ffn_moe_down-0", X.reshape(3, 2, 2)[:, order])]
    assert compare(recording(*ours), recording(*theirs)).misses == []
    assert len(compare(recording(*ours), recording(theirs[0], ours[1])).misses) == 1


def test_some_nodes_alone(run):
    """Values per expert come with the ids they are ordered by, or the lean graph's order would show."""
    lean, plain = (record(replace(run, graph=graph, patterns=("ffn_moe_down-*", "l_out-2"))) for graph in ("lean", "plain"))
    assert {v.name for v in lean.values} == {*(f"ffn_moe_{x}-{il}" for x in ("down", "topk") for il in range(4)), "l_out-2"}
    assert compare(lean, plain).misses == []


def test_names_are_joined_with_their_occurrence():
    ours = recording(value("a-0", X), value("a-0", 2 * X, 1), value("b-0", X))
    found = compare(ours, recording(value("a-0", X), value("c-0", X)))
    assert (len(found.nodes), found.only_here, found.only_there) == (1, ("a-0#1", "b-0#0"), ("c-0#0",))
    found = compare(ours, recording(value("a-0", 2 * X, None)))
    assert [(node.value.occurrence, node.nmse) for node in found.nodes] == [(1, 0)]


def test_what_cannot_be_compared():
    found = compare(recording(value("a-0", X), value("b-0", X)), recording(value("a-0", X), value("b-0", X[:2])))
    assert (len(found.nodes), found.unlike) == (1, ("b-0",))
    with pytest.raises(OptionError, match="ran other tokens: 3 here"):
        compare(recording(value("a-0", X)), recording(value("a-0", X), tokens=(1, 2, 4)))
    with pytest.raises(OptionError, match="no node of the same name"):
        compare(recording(value("a-0", X)), recording(value("b-0", X)))


def test_a_node_that_only_some_ubatches_have():
    """A step may do without a node of the prompt's graph: it is compared where both sides have it, and nowhere else."""
    first, both = value("s-0", X[:1], how="each"), value("s-0", X[:2], how="each")
    off = replace(both, array=both.array * np.float32([[2], [1]]))
    assert compare(recording(replace(first, present=(0,))), recording(both)).misses == []
    assert compare(recording(both), recording(replace(first, present=(0,)))).misses == []
    assert [n.ubatch for n in compare(recording(replace(first, present=(0,))), recording(off)).misses] == [0]
    assert compare(recording(replace(value("s-0", X[1:2], how="each"), present=(1,))), recording(off)).misses == []
    tokens = replace(value("t-0", X[2:]), present=(1,))
    assert compare(recording(tokens), recording(value("t-0", X))).misses == []
    assert len(compare(recording(tokens), recording(value("t-0", X[::-1].copy()))).misses) == 1
    # the last of a reference that kept no other is of the last ubatch
    only_last = value("s-0", X[1], how="last", occurrence=None)
    found = compare(recording(replace(first, present=(0,)), value("a-0", X)), recording(only_last, value("a-0", X)))
    assert (found.unlike, len(found.nodes)) == (("s-0",), 1)


def test_values_of_ubatches_are_joined():
    parts = [{("x", 0): ("MUL", (4, n, 1, 1), np.full((1, 1, n, 4), n)), ("t", 0): ("CONT", (n, 4, 1, 1), np.full((1, 1, 4, n), n)),
              ("s", 0): ("ADD", (5, 1, 1, 1), np.full((1, 1, 1, 5), n)), ("w", 0): ("CONCAT", (n + 3, 1, 1, 1), np.full((1, 1, 1, n + 3), n)),
              ("node_7", 0): ("ADD", (5, 1, 1, 1), np.zeros((1, 1, 1, 5)))} for n in (2, 1)]  # fmt: skip
    found = {v.name: v for v in merge(parts, [2, 1])}
    assert {name: v.how for name, v in found.items()} == {"x": "tokens", "t": "tokens", "s": "each", "w": "last"}
    assert [found[name].array.reshape(len(found[name].array), -1)[:, 0].tolist() for name in "xts"] == [[2, 2, 1], [2, 2, 1], [2, 1]]
    assert found["w"].array.size == 4 and found["x"].ne == (4, 2)


# --- recordings on disk, and sides in processes of their own ---


def test_a_recording_round_trips(run, tmp_path):
    path = tmp_path / "run.safetensors"
    for made in (record(run), record(replace(run, kind=FLOAT64))):
        made.save(path)
        read = Recording.load(path)
        assert (read.title, read.tokens, read.ubatches) == (made.title, made.tokens, made.ubatches)
        for a, b in zip(made.values, read.values, strict=True):
            assert replace(a, array=0) == replace(b, array=0)
            assert a.array.dtype == b.array.dtype and np.array_equal(a.array, b.array, equal_nan=True)
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        assert "l_out-3" in file.keys()


def test_another_file_is_no_recording(tmp_path, run):
    from qwen3next_ggml.array_file import write_arrays

    path = tmp_path / "x.safetensors"
    write_arrays(path, {"kind": "something"}, {"a": X.astype(np.float32)})
    with pytest.raises(OptionError, match="not a recording: its kind is 'something'"):
        reference_of(str(path), run)
    with pytest.raises(StateError, match="No such file"):
        reference_of(str(tmp_path / "none.safetensors"), run)


def test_a_child_records_what_this_process_does(run):
    here, there = record(run), record_apart(run)
    assert here.title == there.title and compare(here, there).worst.nmse == 0


@pytest.mark.parametrize("provider", ["ggml_python", "llama_cpp"])
def test_each_side_has_a_libggml_of_its_own(run, truth, provider):
    there = record_apart(replace(run, ggml=provider))
    assert f" of {provider}, " in there.title
    assert compare(there, truth).misses == []


def test_a_process_that_imports_opens_no_libggml():
    """Otherwise a child could not choose, and llama.cpp would find another one already there."""
    code = "import sys, qwen3next_ggml.parity.worker; print(sys.modules['qwen3next_ggml.ggml.provider']._open)"
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_what_a_child_refuses_is_one_sentence(run):
    with pytest.raises(BackendError, match="^no device CUDA7; "):
        record_apart(replace(run, device="CUDA7"))
    with pytest.raises(BackendError, match="cannot load nowhere.gguf"):
        record_apart(replace(run, kind=LLAMA, path="nowhere.gguf"))


def test_what_a_reference_means(run):
    assert reference_of("CPU", replace(run, device="X")).device == "CPU"
    assert reference_of("plain", replace(run, graph="lean", device="X", delta_net="chunked")) == replace(run, device="X")
    assert reference_of("plain", run, ggml="other").ggml == "other"
    # sides that do not know a setting are the same run whatever it is
    assert len({reference_of(ref, replace(run, graph=g)) for ref in ("float64", "llama.cpp") for g in ("plain", "lean")}) == 2


def test_the_variants_of_a_sweep(run):
    found = list(variants(run))
    assert len(set(found)) == len(found) == 2 * (6 + 4 + 4)
    assert {v.n_ubatch for v in found} == {1, 3, 11}
