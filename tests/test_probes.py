"""Reading and replacing values by name while a session decodes."""

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.errors import GraphError
from qwen3next_ggml.graph.inputs import Sizes
from qwen3next_ggml.graph.key import GraphKey
from qwen3next_ggml.graph.options import FAST_OPTIONS, LEAN
from qwen3next_ggml.probes import look
from tests.kit import max_abs, reference_of

TOKENS = np.random.default_rng(3).integers(0, 97, 40).tolist()
FAST = dict(n_ctx=256, type_k="f32", type_v="f32")


@pytest.fixture(scope="module")
def model(toys):
    with q.load(toys.t0, n_threads=1) as model:
        yield model


@pytest.fixture
def session(model):
    with model.session(**FAST, n_ubatch=16) as s:
        yield s


@pytest.fixture(scope="module")
def traced(toys):
    """What the reference computes under each name, one row a token."""
    model, rows = reference_of(toys.t0), []
    for token in TOKENS:
        rows.append({})
        model.decode([token], trace=rows[-1])
    return [{name: np.squeeze(value) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize("name", [
    "attn_norm-0", "conv_output_silu-1", "final_output-2", "attn_pregate-3", "ffn_moe_out-1", "l_out-3", "result_norm",
])  # fmt: skip
@pytest.mark.parametrize("graph, delta_net", [("lean", "fused"), ("plain", "chunked")])
def test_values_over_several_ubatches_are_the_references(model, traced, name, graph, delta_net):
    with model.session(**FAST, n_ubatch=16, graph=graph, delta_net=delta_net, flash_attn=False) as s, s.capture(name) as t:
        s.decode(TOKENS, logits="all")
    want = np.stack([np.ravel(row[name]) for row in traced])
    got = t[name].reshape(len(TOKENS), -1)
    assert max_abs(got, want) < 1e-4
    assert max_abs(got[::-1], want) > 1e-2


def test_a_state_keeps_the_last_value(session, traced):
    with session.capture("new_state-0") as t:
        session.decode(TOKENS)
    # the op keeps the key axis last, as session.state does
    assert np.array_equal(t["new_state-0"], session.state(0)["s"])


def test_reading_everything_changes_no_logits(model):
    with model.session(**FAST, graph="plain") as s:
        want = s.decode(TOKENS, logits="all")
        s.clear()
        with s.capture("*") as t:
            got = s.decode(TOKENS, logits="all")
        assert np.array_equal(got, want) and len(t) > 200
        s.clear()
        assert np.array_equal(s.decode(TOKENS, logits="all"), want)


def test_only_options_that_hide_a_node_are_switched_off(session):
    def options(*patterns):
        with session.capture(*patterns):
            key = session.probes.key(session.probes.base)
        return {name for name in FAST_OPTIONS if getattr(session.options, name) and not getattr(key.options, name)}

    assert options("attn_norm-0") == set()
    assert options("ffn_moe_probs-1") == {"top_k_first"}
    assert options("l_out-3") == {"prune_last"}
    assert options("ffn_moe_weighted-0", "l_out-3") == {"expert_sum", "prune_last"}


def test_a_repeated_name_is_told_apart(session):
    with session.capture("Kcur-3", "Vcur-3#0") as t:
        session.decode(TOKENS[:5])
    assert t["Kcur-3#0"].shape == (5, 96) and t["Kcur-3"].shape == (5, 4, 24)  # projected; rotated, per head
    assert list(t) == ["Vcur-3", "Kcur-3"] or list(t) == ["Kcur-3", "Vcur-3"]
    with pytest.raises(KeyError, match="Kcur-3#7"):
        t["Kcur-3#7"]


@pytest.mark.parametrize("use", [lambda s, name: s.capture(name), lambda s, name: s.patch(name, lambda g, x: x)], ids=["capture", "patch"])
def test_an_unknown_name_gets_the_closest(session, use):
    with pytest.raises(GraphError, match="no node is named l_outt-3; close to it are .*l_out-3"), use(session, "l_outt-3"):
        pass
    assert not session.probes.captures


def test_a_patch_acts_where_it_is_and_nowhere_else(session, traced):
    want = session.decode(TOKENS, logits="all")
    session.clear()
    with session.patch("l_out-1", lambda g, x: g.scale(x, 0.5)), session.capture("l_out-0", "l_out-1", "attn_norm-2") as t:
        got = session.decode(TOKENS, logits="all")
    assert max_abs(got, want) > 1e-2
    assert max_abs(t["l_out-0"], np.stack([row["l_out-0"] for row in traced])) < 1e-4
    assert max_abs(t["l_out-1"], 0.5 * np.stack([row["l_out-1"] for row in traced])) < 1e-4
    # what follows was computed from the replaced value: an rms norm does not see its scale
    assert max_abs(t["attn_norm-2"], np.stack([row["attn_norm-2"] for row in traced])) < 1e-4
    session.clear()
    assert np.array_equal(session.decode(TOKENS, logits="all"), want)


def test_a_direction_enters_as_an_array(session):
    direction = np.random.default_rng(1).normal(size=64)
    want = session.decode(TOKENS[:8])
    session.clear()
    with session.patch("l_out-3", lambda g, x: g.add(x, g.input("direction", 0 * direction))):
        assert max_abs(session.decode(TOKENS[:8]), want) < 1e-5
    session.clear()
    with session.patch("l_out-3", lambda g, x: g.add(x, g.input("direction", direction))):
        assert max_abs(session.decode(TOKENS[:8]), want) > 1e-2


def test_a_name_given_twice_on_the_way_is_replaced_once(session):
    with session.patch("ffn_moe_out-0", lambda g, x: g.scale(x, 2.0)), session.capture("ffn_moe_out-0") as twice:
        session.decode(TOKENS[:4])
    session.clear()
    with session.capture("ffn_moe_out-0") as once:
        session.decode(TOKENS[:4])
    assert max_abs(twice["ffn_moe_out-0"], 2 * once["ffn_moe_out-0"]) < 1e-6


@pytest.mark.parametrize("fn, says", [
    (lambda g, x: g.sum(x), r"expected a value of shape \[64, 3, 1, 1\], got \[1, 1, 1, 1\]"), (lambda g, x: 5, "got 5"),
])  # fmt: skip
def test_a_patch_of_another_shape_is_refused(session, fn, says):
    want = session.decode(TOKENS[:3])
    session.clear()
    with session.patch("l_out-0", fn), pytest.raises(GraphError, match=says):
        session.decode(TOKENS[:3])
    assert session.n_past() == 0 and np.array_equal(session.decode(TOKENS[:3]), want)


def test_graphs_of_a_block_go_with_it(session):
    session.decode(TOKENS[:3])
    n = len(session.graphs)
    for i in range(3):
        with session.patch("l_out-0", lambda g, x, i=i: g.scale(x, 1.0 + i)):
            session.decode([1])
    assert len(session.graphs) <= n + 1


@pytest.mark.parametrize("inner", ["l_out-0", "l_out-1"])
def test_captures_inside_each_other(session, inner):
    """Each sees what happens while it is in force, the same name or not."""
    with session.capture("l_out-0") as t:
        session.decode(TOKENS[:3])
        with session.capture(inner) as u:
            session.decode(TOKENS[3:5])
        session.decode(TOKENS[5:9])
    assert (t["l_out-0"].shape, u[inner].shape) == ((9, 64), (2, 64)) and list(u) == [inner]
    assert inner != "l_out-0" or np.array_equal(t["l_out-0"][3:5], u[inner])
    assert not session.probes.captures and session.probes.key(session.probes.base) == session.probes.base


def test_an_input_that_a_patch_leaves_unread(model):
    """It gets no memory, so there is nothing to read, and the step goes through."""
    def flat(g, x):
        return g.repeat_4d(g.input("flat", np.full(1, 1 / 256)), *x.ne)

    with model.session(**FAST, graph="plain", flash_attn=False) as s, s.patch("kq_soft_max-3", flat), s.capture("*") as t:
        s.decode(TOKENS[:3])
        assert s.n_past() == 3 and "attn_inp_kq_mask" not in t and "inp_pos" in t
        # all cells alike: of 256, three hold a value
        assert max_abs(t["kqv-3"][0, 0], t["Vcur-3"][:, 0].sum(axis=0) / 256) < 1e-6
        with pytest.raises(GraphError, match="no node is named attn_inp_kq_mask"), s.capture("attn_inp_kq_mask"):
            pass


@pytest.mark.parametrize("name", ["conv_state_update-1", "rs_s_copy", "state_predelta-0", "conv_states-2"])
def test_nodes_of_adjacent_slots_are_there_to_read(session, name):
    with session.capture(name) as t:
        session.decode(TOKENS[:3])
        session.decode(TOKENS[3:4])
    assert list(t) == [name] and np.isfinite(t[name]).all()


def test_what_only_a_single_token_hides(session):
    """A step may update states where they lie; asked for, they are there after every step."""
    with session.capture("new_state-0", "state_predelta-0") as t:
        for n in (3, 1, 1, 2):
            before = session.state(0)["s"]
            session.decode(TOKENS[:n])
            assert np.array_equal(t["new_state-0"], session.state(0)["s"]) and np.array_equal(t["state_predelta-0"], before)


@pytest.mark.parametrize("n", [1, 3, 16, 40])
def test_what_only_a_long_prompt_reshapes(model, traced, n):
    """The op of a prompt may pair the heads by itself; asked for, the repeated heads are there."""
    with model.session(**FAST) as s, s.capture("k_conv_predelta-1") as t:
        s.decode(TOKENS[:n])
    assert t["k_conv_predelta-1"].reshape(n, 6, 32).shape == (n, 6, 32)
    assert max_abs(t["k_conv_predelta-1"].reshape(n, 6, 32), np.stack([row["k_conv_predelta-1"] for row in traced[:n]])) < 1e-4


def test_an_option_hidden_behind_another_is_found(model):
    """Two options that each remove a node: both are switched off for it, neither for another one."""
    def shapes(key):
        """Of both options it is enough that one is on."""
        names = {("a-0", 0): (4, key.sizes.n_seq_tokens)}
        return names if key.options.prune_last or key.options.expert_sum else names | {("b-0", 0): (key.sizes.n_seq_tokens,)}

    key = GraphKey(Sizes(1, 1, 1, 256, 0), LEAN)
    assert look(shapes, key, ("a-0",)) == ({("a-0", 0): 2}, ())
    axes, off = look(shapes, key, ("b-*",))
    assert axes == {("b-0", 0): 3} and set(off) == {"prune_last", "expert_sum"}


def test_a_second_look_builds_nothing(session, monkeypatch):
    with session.capture("l_out-1"):
        pass
    monkeypatch.setattr(type(session.graphs), "build", None)
    with session.capture("attn_norm-*", "gate-2"):
        assert session.probes.key(session.probes.base).options == session.options
