"""Every fast option of the graph, alone and taken from the lean graph: the plain graph's numbers, fewer nodes, barriers and bytes."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.graph import attention, delta_state
from qwen3next_ggml.graph.options import FAST_OPTIONS, LEAN, PLAIN
from tests.kit import nmse

TEXT = np.random.default_rng(11).integers(0, 97, 300).tolist()
TOLERANCE = 1e-6
# these add in another order or round less than the plain graph, or multiply fewer rows, which one libggml adds up otherwise; all
# others give its very bits
ROUNDED_OTHERWISE = {"prune_last", "top_k_first", "expert_sum", "joint_sum", "kv_as_stored", "grouped_attn", "conv_by_rows"}
# kernels and bytes written that a one-token step and a prompt of 200 lose to each, at least; 0: something else is won
STEP = {
    "prune_last": (1, 1), "top_k_first": (12, 300), "expert_sum": (8, 4000), "state_view": (6, 80_000), "state_in_place": (6, 140_000),
    "joint_qk": (12, 0), "fewer_conts": (10, 3000), "stacked_weights": (20, 0),
}  # fmt: skip
PROMPT = {"prune_last": (-1, 1_000_000), "conv_by_rows": (-12, 690_000), "heads_as_seqs": (-3, 800_000), "fewer_conts": (10, 600_000), "expert_sum": (8, 800_000)}


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def answers(model, options, *, type_kv="f32", **more):
    """Logits of prompts and steps, of one sequence and of several side by side, adjacent and apart."""
    with model.session(n_ctx=1024, n_seq_max=4, graph=options, type_k=type_kv, type_v=type_kv, **more) as s:
        out = [s.decode(TEXT[:150], logits="all")]
        out += [s.decode([token]) for token in TEXT[150:160]]
        out += [s.decode(TEXT[160:165], logits="all"), s.decode(TEXT[:7], seq=1), s.decode(TEXT[5:20], seq=2)]
        for batch in [{0: 170, 1: 171, 2: 172}] * 3 + [{1: 175, 2: 176}, {0: 177, 2: 178}]:
            out += s.decode_batch({seq: [TEXT[i]] for seq, i in batch.items()}).values()
        out += s.decode_batch({0: TEXT[200:203], 1: TEXT[210:250]}).values()
        out.append(s.decode(TEXT[250:252], seq=1))
    return np.concatenate([x.reshape(-1) for x in out])


@pytest.fixture(scope="module")
def plain(model):
    known = {}

    def of(**how):
        key = tuple(how.items())
        if key not in known:
            known[key] = answers(model, PLAIN.but(flash_attn=how.get("flash_attn", True)), type_kv=how["type_kv"])
        return known[key]

    return of


@pytest.mark.parametrize("flash_attn, type_kv", [(True, "f16"), (False, "f32")])
@pytest.mark.parametrize("name", FAST_OPTIONS)
def test_alone(model, plain, name, flash_attn, type_kv):
    want = plain(flash_attn=flash_attn, type_kv=type_kv)
    options = PLAIN.but(flash_attn=flash_attn, **{name: True})
    got = answers(model, options, type_kv=type_kv)
    assert nmse(got, want) < TOLERANCE
    assert np.array_equal(got, want) or name in ROUNDED_OTHERWISE


@pytest.mark.parametrize("flash_attn, type_kv", [(True, "f16"), (False, "f32")])
@pytest.mark.parametrize("without", [None, *FAST_OPTIONS])
def test_together(model, plain, without, flash_attn, type_kv):
    options = LEAN.but(flash_attn=flash_attn, **({without: False} if without else {}))
    assert nmse(answers(model, options, type_kv=type_kv), plain(flash_attn=flash_attn, type_kv=type_kv)) < TOLERANCE


@pytest.mark.parametrize("more", [{"n_rollback": 2}, {"checkpoint_every": 16}, {"n_ubatch": 48}], ids=str)
def test_together_with_what_sessions_keep(model, plain, more):
    assert nmse(answers(model, LEAN, type_kv="f16", **more), plain(flash_attn=True, type_kv="f16")) < TOLERANCE


def counts(model, options, n_tokens):
    with model.session(n_ctx=512, graph=options) as s:
        stats = s.graph(n_tokens).stats()
        return np.array([stats["kernels"], stats["bytes_written"]])


@pytest.mark.parametrize("n_tokens, saves", [(1, STEP), (200, PROMPT)], ids=["step", "prompt"])
def test_what_each_saves(model, n_tokens, saves):
    """Beside the plain graph. What is not listed saves time alone: threads share work, or memory is read once instead of eight times."""
    base = counts(model, PLAIN, n_tokens)
    for name, least in saves.items():
        assert (base - counts(model, PLAIN.but(**{name: True}), n_tokens) >= least).all(), name


def test_lean_step_in_numbers(model):
    """Four layers, three of them delta nets. No state is gathered or copied, no head repeated apart, nothing of size zero."""
    with model.session(n_ctx=512) as s:
        view = s.graph(1)
    ops = {row["op"]: row["nodes"] for row in view.stats()["by_op"]}
    assert ops["GATED_DELTA_NET"] == ops["CPY"] == ops["REPEAT"] == 3 and ops["GET_ROWS"] == 1 + 4
    assert view.stats()["barriers"] <= 173 and all(node.kind != "empty" for node in view.nodes)


def test_a_state_out_of_place_is_seen(model, plain, monkeypatch):
    """The mutation of the tests above: the new state falls one row beside the old one."""
    at = delta_state.delta_net_in_place

    def beside(g, inp, delta, *more):
        into = g.into
        monkeypatch.setattr(type(g), "into", lambda self, a, owner, offset: into(a, owner, offset - 64))
        out = at(g, inp, delta, *more)
        monkeypatch.undo()
        return out

    with monkeypatch.context() as patch:
        patch.setattr("qwen3next_ggml.models.qwen3next.delta_net_in_place", beside)
        assert nmse(answers(model, PLAIN.but(state_in_place=True), type_kv="f16"), plain(flash_attn=True, type_kv="f16")) > 100 * TOLERANCE


def test_groups_of_the_wrong_heads_are_seen(model, plain, monkeypatch):
    groups = attention._attend_in_groups

    def shuffled(g, inp, q, k, v, kq_scale, il):
        D, H, T, _ = q.ne
        q = g.cont(g.permute(g.reshape_4d(q, D, k.ne[1], H // k.ne[1], T), 0, 2, 1, 3))
        return groups(g, inp, g.reshape_3d(q, D, H, T), k, v, kq_scale, il)

    monkeypatch.setattr(attention, "_attend_in_groups", shuffled)
    assert nmse(answers(model, PLAIN.but(grouped_attn=True), type_kv="f16"), plain(flash_attn=True, type_kv="f16")) > 100 * TOLERANCE
