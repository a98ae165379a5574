"""Every path through the graph against the float64 reference, on a toy with F32 weights and F32 cache.

Which kernels run, how tokens are cut into ubatches, and what the session did before must not show in logits or states.
"""

from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import QGraphError
from qwen3next_ggml.graph import delta_net as delta_net_block
from qwen3next_ggml.models import qwen3next
from tests.kit import max_abs, poison, reference_of

TOLERANCE = 1e-4
# llama.cpp's own graph hands an F32 cache to flash attention through F16
TOLERANCE_F16_CACHE = 2e-3
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 512, 513, 519)
N_DECODE = 3
DELTA_NETS, GRAPHS, FLASH = ("fused", "chunked", "autoregressive"), ("plain", "lean"), (True, False)
PATHS = list(product(DELTA_NETS, GRAPHS, FLASH))
TOKENS = np.random.default_rng(7).integers(0, 97, max(LENGTHS) + N_DECODE).tolist()
RECURRENT = (0, 1, 2)


def options(delta_net="fused", graph="lean", flash_attn=True, **more):
    return dict(n_ctx=1024, type_k="f32", type_v="f32", delta_net=delta_net, graph=graph, flash_attn=flash_attn) | more


def tolerance(graph, flash_attn):
    return TOLERANCE_F16_CACHE if (graph, flash_attn) == ("plain", True) else TOLERANCE


class Answers:
    """The reference's logits after every token of one sequence, and its recurrent states after some of them."""

    def __init__(self, model, tokens, lengths, seq=0):
        logits, self.states, at = [], {}, 0
        for n in sorted(lengths):
            logits.append(model.decode(tokens[at:n], seq=seq))
            self.states[n] = {il: model.state(il, seq=seq) for il in RECURRENT}
            at = n
        self.logits = np.concatenate(logits)

    def distance(self, logits, session, n, seq=0):
        """Return how far the last row of logits, and the states, of a session that holds n tokens are off."""
        parts = [max_abs(logits[-1], self.logits[n - 1])]
        for il in RECURRENT:
            got = session.state(il, seq)
            parts += [max_abs(got[name], want) for name, want in self.states[n][il].items()]
        return max(parts)


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def answers(toys):
    wanted = {n + i for n in LENGTHS for i in range(N_DECODE + 1)}
    return Answers(reference_of(toys.t0), TOKENS, wanted)


# --- C19: how tokens are cut ---


@pytest.mark.parametrize("n_ubatch", [1, 3, 64, 512])
@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_prompt_of_any_length(model, answers, delta_net, graph, flash_attn, n_ubatch):
    lengths = LENGTHS if n_ubatch >= 64 and delta_net != "autoregressive" else (1, 3, 5, 64, 129)
    with model.session(**options(delta_net, graph, flash_attn, n_ubatch=n_ubatch)) as s:
        for n in lengths:
            s.clear()
            off = answers.distance(s.decode(TOKENS[:n]), s, n)
            assert off < tolerance(graph, flash_attn), f"{n} tokens"


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_long_sequence_token_by_token(model, answers, delta_net, graph, flash_attn):
    with model.session(**options(delta_net, graph, flash_attn, n_ubatch=1)) as s:
        at = 0
        for n in LENGTHS:
            off = answers.distance(s.decode(TOKENS[at:n]), s, n)
            assert off < tolerance(graph, flash_attn), f"{n} tokens"
            at = n


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_decode_after_prefill(model, answers, delta_net, graph, flash_attn):
    with model.session(**options(delta_net, graph, flash_attn, n_ubatch=64)) as s:
        for n in (1, 4, 63, 64, 65, 129):
            s.clear()
            s.decode(TOKENS[:n], logits="none")
            for at in range(n, n + N_DECODE):
                off = answers.distance(s.decode([TOKENS[at]]), s, at + 1)
                assert off < tolerance(graph, flash_attn), f"{n} tokens, then token {at}"


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_all_rows(model, answers, delta_net, graph, flash_attn):
    with model.session(**options(delta_net, graph, flash_attn, n_ubatch=64)) as s:
        assert max_abs(s.decode(TOKENS[:129], logits="all"), answers.logits[:129]) < tolerance(graph, flash_attn)


@pytest.mark.parametrize("graph, delta_net", list(product(GRAPHS, DELTA_NETS)))
def test_sequences_in_one_batch(model, answers, toys, graph, delta_net):
    """Solo and mixed batches by turns, over adjacent and scattered slots."""
    others = {1: TOKENS[100:], 3: TOKENS[200:]}
    reference = toys.t0_reference
    reference.clear(1), reference.clear(3)
    want = {0: answers} | {seq: Answers(reference, ids, (3, 4, 11, 12, 32), seq) for seq, ids in others.items()}
    text = {0: TOKENS} | others
    steps = [{0: 5, 1: 4}, {3: 4}, {0: 64, 3: 11}, {1: 11}, {0: 65, 1: 12, 3: 12}, {0: 66, 3: 32}]
    with model.session(**options(delta_net, graph, False, n_seq_max=4, n_ubatch=64)) as s:
        for step in steps:
            out = s.decode_batch({seq: text[seq][s.n_past(seq) : n] for seq, n in step.items()})
            for seq, n in step.items():
                assert want[seq].distance(out[seq], s, n, seq) < TOLERANCE, f"sequence {seq} at {n} in {step}"


# --- C06: which key head a value head reads ---


HEADS = {"3 to 1": (2, 6), "1 to 1": (4, 4), "2 to 1": (4, 8)}


@pytest.mark.parametrize("graph, delta_net", list(product(GRAPHS, DELTA_NETS)))
@pytest.mark.parametrize("group, rank", HEADS.values(), ids=HEADS)
def test_head_pairing(toys, monkeypatch, group, rank, graph, delta_net):
    path = toys.file(metadata={"ssm.group_count": group, "ssm.time_step_rank": rank, "ssm.inner_size": 32 * rank})
    want = reference_of(path).decode(TOKENS[:70])

    def off():
        with qwen3next_ggml.load(path, n_threads=1) as model, model.session(**options(delta_net, graph, False)) as s:
            return max_abs(s.decode(TOKENS[:70], logits="all"), want)

    assert off() < TOLERANCE
    pair_heads, delta_net_of = delta_net_block.pair_heads, delta_net_block.delta_net
    monkeypatch.setattr(qwen3next, "pair_heads", lambda g, x, H_v, pairing: pair_heads(g, x, H_v, "tiled"))
    monkeypatch.setattr(qwen3next, "delta_net", lambda *args, pairing, **more: delta_net_of(*args, pairing="tiled", **more))
    assert (off() > 100 * TOLERANCE) == (group != rank)


def test_heads_that_do_not_divide_are_refused(toys):
    with pytest.raises(QGraphError, match="5"):
        qwen3next_ggml.load(toys.file(metadata={"ssm.time_step_rank": 5, "ssm.inner_size": 160}))


# --- C41, C40: what a session did before ---


@pytest.mark.parametrize("graph", GRAPHS)
def test_graph_reuse_changes_nothing(model, answers, graph):
    def run(s, forget):
        rows = []
        for token in TOKENS[:50]:
            rows.append(s.decode([token])[0])
            if forget:
                s.graphs._drop_all()
        return np.stack(rows)

    how = options(graph=graph, flash_attn=False)
    with model.session(**how) as reusing, model.session(**how) as rebuilding:
        got = run(reusing, forget=False)
        assert np.array_equal(got, run(rebuilding, forget=True))
        assert reusing.n_builds == 1 and rebuilding.n_builds == 50
    assert max_abs(got, answers.logits[:50]) < TOLERANCE


@pytest.mark.parametrize("graph", GRAPHS)
def test_state_carries_over_unless_cleared(model, answers, graph):
    with model.session(**options(graph=graph, flash_attn=False, n_ubatch=64)) as s:
        for n in (63, 64, 129, 512):
            off = answers.distance(s.decode(TOKENS[s.n_past() : n]), s, n)
            assert off < TOLERANCE, f"at {n}"
        again = s.decode(TOKENS[:129])
        assert max_abs(again[-1], answers.logits[128]) > 100 * TOLERANCE
        s.clear()
        assert answers.distance(s.decode(TOKENS[:129]), s, 129) < TOLERANCE


@pytest.mark.parametrize("flash_attn", FLASH)
@pytest.mark.parametrize("delta_net", DELTA_NETS)
def test_dirty_memory_does_not_show(model, delta_net, flash_attn):
    with model.session(**options(delta_net, "lean", flash_attn, n_ubatch=64)) as clean:
        want = [clean.decode(TOKENS[:70]), clean.decode(TOKENS[70:71])]
    with model.session(**options(delta_net, "lean", flash_attn, n_ubatch=64)) as s:
        for byte in (0xFF, 0x3E):
            poison(s, byte)
            s.clear()
            assert np.array_equal(s.decode(TOKENS[:70]), want[0]) and np.array_equal(s.decode(TOKENS[70:71]), want[1])


# --- C01, C02: the same weights in other files ---


LAYOUTS = {
    "legacy ssm_in": dict(legacy=True),
    "fused attention": dict(layouts=("attn_qkv",)),
    "merged experts": dict(layouts=("ffn_gate_up_exps",)),
    "with a NextN block": dict(mtp=True),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
def test_file_layouts_give_the_same_logits(model, toys, how, graph):
    with model.session(**options(graph=graph)) as s:
        want = s.decode(TOKENS[:70], logits="all")
    with qwen3next_ggml.load(toys.file(**how), n_threads=1) as other, other.session(**options(graph=graph)) as s:
        assert max_abs(s.decode(TOKENS[:70], logits="all"), want) < 1e-5


def test_tied_output(toys):
    path = toys.file(tied=True)
    with qwen3next_ggml.load(path, n_threads=1) as model, model.session(**options(flash_attn=False)) as s:
        assert max_abs(s.decode(TOKENS[:20], logits="all"), reference_of(path).decode(TOKENS[:20])) < TOLERANCE


BIASES = ("attn_q_bias", "attn_k_bias", "attn_v_bias")


@pytest.mark.parametrize("layouts", [(), ("attn_qkv",)], ids=["separate", "fused"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_attention_biases(toys, graph, layouts):
    path, bare = toys.file(optional=BIASES), reference_of(toys.file(optional=()))
    with qwen3next_ggml.load(toys.file(optional=BIASES, layouts=layouts), n_threads=1) as model:
        assert all(getattr(model.weights.blk[3], name) is not None for name in BIASES)
        with model.session(**options(graph=graph, flash_attn=False)) as s:
            got = s.decode(TOKENS[:20], logits="all")
    assert max_abs(got, reference_of(path).decode(TOKENS[:20])) < TOLERANCE
    assert max_abs(got, bare.decode(TOKENS[:20])) > 100 * TOLERANCE


# --- rope parameters ---


SCALINGS = {
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    "yarn with attention factor": {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": 1.3,
    },
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "none": {"rope.scaling.type": "none", "rope.scaling.factor": 8.0},
}  # fmt: skip


@pytest.mark.parametrize("keys", SCALINGS.values(), ids=SCALINGS)
def test_rope_scaling(toys, keys):
    base = {"rope.freq_base": 100.0, "full_attention_interval": 2}
    scaled, plain = toys.file(metadata=base | keys), toys.file(metadata=base)
    with qwen3next_ggml.load(scaled, n_threads=1) as model, model.session(**options(flash_attn=False)) as s:
        got = s.decode(TOKENS[:70], logits="all")
    assert max_abs(got, reference_of(scaled).decode(TOKENS[:70])) < TOLERANCE
    unscaled = max_abs(got, reference_of(plain).decode(TOKENS[:70]))
    assert unscaled < TOLERANCE if keys["rope.scaling.type"] == "none" else unscaled > 100 * TOLERANCE
