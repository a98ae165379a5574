"""The NextN head: its logits against float64 and llama.cpp, whatever the session did before, and what a draft leaves behind."""

import os
from functools import partial

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import drafter as drafter_module
from qwen3next_ggml.errors import BackendError, OptionError, UnsupportedModelError
from qwen3next_ggml.graph.builder import GraphBuilder
from qwen3next_ggml.graph.key import GraphKey
from tests.kit import max_abs, nmse, reference_of
from tests.kit.llama_mtp import run_llama_mtp
from tests.kit.process import ROOT

SAME_LIBGGML = os.environ.get("QGRAPH_GGML") == "llama_cpp"
TOLERANCE = 1e-4
MTP_NAMES = [f"mtp_{name}-4" for name in (
    "tok_embd", "hnorm", "enorm", "concat", "eh_proj", "attn_norm", "Qcur_full", "Qcur_normed", "Kcur_normed", "Qcur", "Kcur",
    "Vcur", "attn_pregate", "gate", "attn_out", "attn_residual", "attn_post_norm", "ffn_moe_out", "ffn_shexp",
    "shared_expert_gate_sigmoid", "ffn_shexp_gated", "ffn_out", "post_ffn",
)]  # fmt: skip
TOKENS = np.random.default_rng(3).integers(0, 97, 260).tolist()
N_PROMPT, N_DRAFT = 150, 3
PATHS = [("lean", True, "fused"), ("lean", False, "fused"), ("plain", False, "fused"), ("lean", True, "chunked"),
         ("plain", False, "autoregressive")]  # fmt: skip


def options(graph="lean", flash_attn=True, delta_net="fused", **more):
    return dict(mtp=True, n_ctx=512, type_k="f32", type_v="f32", graph=graph, flash_attn=flash_attn, delta_net=delta_net) | more


def wanted(reference, tokens, token, n=N_DRAFT):
    """Return the reference's logits of `n` greedy drafts after `token`, which follows `tokens`."""
    trunk, rows = {}, []
    reference.clear()
    reference.decode(tokens, trace=trunk)
    fed, hidden = [*tokens[1:], token], trunk["h_nextn"]
    for _ in range(n):
        head = {}
        rows.append(reference.decode_mtp(fed, hidden, trace=head)[-1])
        fed, hidden = [int(rows[-1].argmax())], head["h_nextn"][-1:]
    return np.stack(rows)


def drafted(session, token, n=N_DRAFT, seq=0):
    """Return the logits of `n` greedy drafts."""
    rows = []

    def choose(logits):
        rows.append(logits.copy())
        return int(logits.argmax())

    assert session.drafter.draft(token, choose, n=n, seq=seq) == [int(row.argmax()) for row in rows]
    return np.stack(rows)


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.mtp, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def reference(toys):
    return reference_of(toys.mtp)


@pytest.fixture(scope="module")
def after_prompt(reference):
    return wanted(reference, TOKENS[:N_PROMPT], TOKENS[N_PROMPT])


@pytest.fixture(scope="module")
def after_accepting(reference):
    return [wanted(reference, TOKENS[: N_PROMPT + 1 + n], TOKENS[-1]) for n in range(N_DRAFT)]


# --- C45: the right hidden, position and order, step after step ---


@pytest.mark.parametrize("n_ubatch", [512, 50], ids=["1 ubatch", "3 ubatches"])
@pytest.mark.parametrize("graph, flash_attn, delta_net", PATHS)
def test_drafts_are_the_references(model, after_prompt, after_accepting, graph, flash_attn, delta_net, n_ubatch):
    with model.session(**options(graph, flash_attn, delta_net, n_rollback=N_DRAFT, n_ubatch=n_ubatch)) as s:
        for n_accepted in range(N_DRAFT):
            s.clear()
            s.decode(TOKENS[:N_PROMPT])
            assert max_abs(drafted(s, TOKENS[N_PROMPT]), after_prompt) < TOLERANCE
            s.decode(TOKENS[N_PROMPT : N_PROMPT + 1 + N_DRAFT], logits="all")
            s.rewind(n=N_DRAFT - n_accepted)
            assert max_abs(drafted(s, TOKENS[-1]), after_accepting[n_accepted]) < TOLERANCE, f"{n_accepted} accepted"


def before_norm(monkeypatch):
    output = GraphBuilder.output
    monkeypatch.setattr(GraphBuilder, "output", lambda g, name, x: output(g, name, x.src[0].src[0]))


def hidden_first(monkeypatch):
    concat = GraphBuilder.concat
    monkeypatch.setattr(
        GraphBuilder, "concat", lambda g, a, b, dim: concat(g, *((b, a) if a.name.startswith("mtp_") else (a, b)), dim)
    )


def one_position_late(monkeypatch):
    first = drafter_module._first_waiting
    monkeypatch.setattr(drafter_module, "_first_waiting", lambda held: min(first(held) + 1, len(held.tokens)))


def hidden_not_rebased(monkeypatch):
    rows = drafter_module._hidden_before
    monkeypatch.setattr(drafter_module, "_hidden_before", lambda held, first: np.roll(rows(held, first), 1, axis=0))


@pytest.mark.parametrize("mutate", [before_norm, hidden_first, one_position_late, hidden_not_rebased])
def test_mutants_are_seen(model, after_prompt, after_accepting, monkeypatch, mutate):
    mutate(monkeypatch)
    with model.session(**options(n_rollback=N_DRAFT)) as s:
        s.decode(TOKENS[:N_PROMPT])
        off = [max_abs(drafted(s, TOKENS[N_PROMPT]), after_prompt)]
        s.decode(TOKENS[N_PROMPT : N_PROMPT + 2], logits="all")
        off.append(max_abs(drafted(s, TOKENS[-1]), after_accepting[1]))
    assert max(off) > 10 * TOLERANCE


def test_single_steps_are_fed_too(model, reference):
    """More of them than may wait, so that some are fed without a draft."""
    n = 2 * drafter_module.MAX_WAITING + 5
    with model.session(**options()) as s:
        for token in TOKENS[:n]:
            s.decode([token], logits="none")
        assert max_abs(drafted(s, TOKENS[n]), wanted(reference, TOKENS[:n], TOKENS[n])) < TOLERANCE


def test_sequences_keep_apart_and_forks_share(model, reference):
    """A fork shares the head's K and V too, and each side goes on with its own."""
    ours, theirs = TOKENS[:40], TOKENS[100:125]
    with model.session(**options(n_seq_max=3, n_rollback=4)) as s:
        s.decode_batch({0: ours, 1: theirs})
        s.fork(0, dst=2)
        s.decode_batch({0: TOKENS[200:203], 1: TOKENS[210:211], 2: TOKENS[220:222]})
        now = {0: ours + TOKENS[200:203], 1: theirs + TOKENS[210:211], 2: ours + TOKENS[220:222]}
        for seq in (2, 0, 1, 2, 0):
            assert max_abs(drafted(s, TOKENS[50 + seq], seq=seq), wanted(reference, now[seq], TOKENS[50 + seq])) < TOLERANCE
        s.rewind(0, n=3)
        s.clear(1)
        s.decode(TOKENS[230:240], seq=1)
        assert max_abs(drafted(s, TOKENS[7], seq=0), wanted(reference, ours, TOKENS[7])) < TOLERANCE
        assert max_abs(drafted(s, TOKENS[8], seq=1), wanted(reference, TOKENS[230:240], TOKENS[8])) < TOLERANCE


def test_after_a_checkpoint_one_hidden_is_missing(model):
    """The hidden before the checkpoint is not kept: the head works on without that one position."""
    with model.session(**options(checkpoint_every=64)) as s, model.session(**options()) as fresh:
        s.decode(TOKENS[:100])
        s.rewind(n=36)
        assert s.n_past() == 64 and s.drafter.draft(1, lambda logits: 1, n=1) == []
        for session, tokens in ((s, TOKENS[64:70]), (fresh, TOKENS[:70])):
            session.decode(tokens)
        seen = [np.count_nonzero(session.memory.kv.fed) for session in (s, fresh)]
        off = max_abs(drafted(s, 1, 1), drafted(fresh, 1, 1))
        assert 0 < off < 1
        assert np.count_nonzero(s.memory.kv.fed) == 68 and np.count_nonzero(fresh.memory.kv.fed) == 69, seen


# --- against llama.cpp: names, ops, shapes, values ---


def record(session, token, monkeypatch):
    """Return name → (op, ne, value) of the graph of a draft's first step."""
    monkeypatch.setattr(drafter_module, "GraphKey", partial(GraphKey, captures=("*",)))
    executor, kept = session.graphs.executor, {}

    def run(built, values, outs):
        type(executor).run(executor, built, values, outs)
        kept.update({at: (node.op, node.ne, value.get()) for at, (node, value) in built.kept.items()})

    monkeypatch.setattr(executor, "run", run)
    session.drafter.draft(token, lambda logits: None, n=1)
    return kept


def test_every_name_of_llama_cpp(toys, model, reference, monkeypatch):
    """Its graph_mtp over the same tokens and hidden."""
    n, trunk = 12, {}
    reference.clear()
    reference.decode(TOKENS[:n], trace=trunk)
    logits, nodes = run_llama_mtp(toys.mtp, TOKENS[1 : n + 1], trunk["h_nextn"], 1)
    assert max_abs(logits, wanted(reference, TOKENS[:n], TOKENS[n], 1)[0]) < TOLERANCE
    with model.session(**options("plain", False)) as s:
        s.decode(TOKENS[:n])
        ours = record(s, TOKENS[n], monkeypatch)
    # ggml numbers what has no name, or derives one from its source
    named = [node for node in nodes if node.op != "NONE" and not node.name.startswith("node_") and " (" not in node.name]
    assert {node.name for node in named} >= {*MTP_NAMES, "h_nextn", "result_output"}
    for node in named:
        op, ne, value = ours[node.name, node.occurrence]
        assert (op, list(ne)) == (node.op, list(node.ne)), node.name
        # cells differ, as position 0 has none of the head's here; what follows the experts picked is in no order
        if not node.name.startswith(("kq", "ffn_moe_argsort")):
            assert nmse(value.reshape(-1), node.array.reshape(-1)) < (1e-10 if SAME_LIBGGML else 1e-7), node.name


# --- what a file may leave to the trunk, or lack ---


OWN = {"nextn_shared_head_norm": "norm", "nextn_embed_tokens": "embedding", "nextn_shared_head_head": "head"}


@pytest.mark.parametrize("own", [(), ("nextn_embed_tokens",), ("nextn_shared_head_head",), tuple(OWN)], ids=len)
def test_own_embedding_head_and_norm(toys, own):
    path = toys.file(mtp=True, optional=own)
    with qwen3next_ggml.load(path, n_threads=1) as model, model.session(**options()) as s:
        assert set(s.drafter.borrowed) == {OWN[name] for name in OWN if name not in own}
        s.decode(TOKENS[:30])
        assert max_abs(drafted(s, TOKENS[30]), wanted(reference_of(path), TOKENS[:30], TOKENS[30])) < TOLERANCE


def test_a_file_without_the_head_is_refused(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model, pytest.raises(UnsupportedModelError, match="got 0 .nextn_predict_layers"):
        model.session(mtp=True)


def test_a_head_left_in_the_file_is_refused(toys):
    with qwen3next_ggml.load(toys.mtp, n_threads=1, load_mtp=False) as model, pytest.raises(OptionError, match="load_mtp=False"):
        model.session(mtp=True)


# --- what drafting leaves behind: nothing ---


def test_the_trunk_does_not_notice(model):
    with model.session(**options()) as s, model.session(**options(mtp=False)) as plain:
        assert "cache_k_l4" not in {layer.k.name for layer in plain.memory.kv.layers.values()}
        for at in (20, 21, 22, 40):
            tokens = TOKENS[s.n_past() : at]
            assert max_abs(s.decode(tokens, logits="all"), plain.decode(tokens, logits="all")) < 1e-6
            drafted(s, TOKENS[at])
            assert (s.n_past(), s.memory.kv.n_used, s.history[0].tokens) == (at, at, TOKENS[:at])


def test_a_draft_that_fails_gives_its_cells_back(model, monkeypatch):
    with model.session(**options()) as s:
        s.decode(TOKENS[:20])
        want = drafted(s, TOKENS[20])
        calls = []

        def run(built, values, outs):
            calls.append(built)
            if len(calls) == 2:
                raise BackendError("stopped")
            type(s.graphs.executor).run(s.graphs.executor, built, values, outs)

        monkeypatch.setattr(s.graphs.executor, "run", run)
        with pytest.raises(BackendError, match="stopped"):
            drafted(s, TOKENS[20])
        monkeypatch.undo()
        assert (s.n_past(), s.memory.kv.n_used) == (20, 20)
        assert max_abs(drafted(s, TOKENS[20]), want) == 0


def test_drafts_end_where_the_cells_do(model):
    with model.session(**options(n_ctx=256)) as s:
        s.decode(TOKENS[:254])
        assert [len(s.drafter.draft(1, lambda logits: 1, n=n)) for n in (1, 2, 3)] == [1, 2, 2]
        s.decode([1, 1])
        assert s.drafter.draft(1, lambda logits: 1, n=3) == []


def test_drafts_survive_a_session_file(model, tmp_path):
    with model.session(**options(n_rollback=4)) as s:
        s.decode(TOKENS[:60])
        s.decode(TOKENS[60:63], logits="all")
        s.save(tmp_path / "s.qstate")
        want = drafted(s, TOKENS[63])
    with model.load_session(tmp_path / "s.qstate") as s:
        assert max_abs(drafted(s, TOKENS[63]), want) < 1e-6


def test_layers_on_two_devices(toys, model):
    with qwen3next_ggml.load(toys.mtp, device=["CPU", "CPU"], n_threads=1) as split:
        rows = []
        for m in (model, split):
            with m.session(**options(n_rollback=3)) as s:
                s.decode(TOKENS[:40])
                rows.append(drafted(s, TOKENS[40]))
    assert max_abs(*rows) < 1e-6


# --- how good the embedded model's head is ---


def agreement(bard, n_tokens):
    """Return how often the head's first guess is the trunk's own, fed with held-out play text."""
    with qwen3next_ggml.load(bard, n_threads=1) as model, model.session(mtp=True, n_ctx=2048) as s:
        tokens = model.tokenizer.encode((ROOT / "tests" / "data" / "cymbeline.txt").read_text())[:n_tokens]
        s.decode(tokens[:1], logits="none")
        same = []
        for token in tokens[1:]:
            guesses = []
            s.drafter.draft(token, lambda logits: guesses.append(int(logits.argmax())), n=1)
            same.append(guesses[0] == int(s.decode([token])[-1].argmax()))
    return np.mean(same)


def test_first_drafts_on_held_out_text(bard, monkeypatch):
    assert agreement(bard, 1400) >= 0.5
    hidden_first(monkeypatch)
    assert agreement(bard, 300) < 0.3
