"""The convolution with a row per token against columns: several sequences, short and long, slots apart, states kept."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import ggml
from qwen3next_ggml.graph import conv
from qwen3next_ggml.graph.builder import GraphBuilder
from qwen3next_ggml.graph.options import LEAN, PLAIN
from tests.kit import nmse

TEXT = np.random.default_rng(12).integers(0, 97, 400).tolist()
TOLERANCE = 1e-6
BY_ROWS = PLAIN.but(conv_by_rows=True)


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def answers(model, options, **more):
    """All logits of prompts of several lengths, each going on from a window that another form may have left, and windows at the end."""
    with model.session(n_ctx=1024, n_seq_max=4, graph=options, **more) as s:
        out = [s.decode(TEXT[:n], logits="all") for n in (63, 64, 65, 1, 67, 3)]
        for lengths in [(70, 70, 70), (64, 64), (81, 64, 2, 1)]:
            tokens = {seq: TEXT[seq : seq + n] for seq, n in enumerate(lengths)}
            out += s.decode_batch(tokens, logits="all").values()
        out += s.decode_batch({0: TEXT[:66], 2: TEXT[1:67]}, logits="all").values()
        out += [s.decode([5], seq=seq) for seq in range(4)]
    return np.concatenate([np.reshape(x, -1) for x in out])


@pytest.fixture(scope="module")
def plain(model):
    return answers(model, PLAIN)


@pytest.mark.parametrize("options", [BY_ROWS, BY_ROWS.but(state_view=True), LEAN], ids=["alone", "reading where states lie", "lean"])
@pytest.mark.parametrize("more", [{}, {"n_ubatch": 67}, {"n_rollback": 2}, {"checkpoint_every": 80}], ids=str)
def test_rows_give_what_columns_give(model, plain, options, more):
    assert nmse(answers(model, options, **more), plain) < TOLERANCE


def ops(model, options, n_tokens, **more):
    with model.session(n_ctx=512, graph=options, **more) as s:
        return [node.op for node in s.graph(n_tokens).nodes]


@pytest.mark.parametrize("n_tokens, by_rows", [(1, 0), (63, 0), (64, 3), (70, 3)])
def test_which_prompts_go_by_rows(model, n_tokens, by_rows):
    found = ops(model, LEAN, n_tokens)
    assert found.count("CONV_2D_DW") == 2 * by_rows and found.count("SSM_CONV") == 3 - by_rows


def test_states_inside_a_ubatch_need_columns(model):
    """With rollback, windows after each of the last tokens are kept; one of them may begin in the old one."""
    assert "CONV_2D_DW" not in ops(model, LEAN, 70, n_rollback=3)


def test_a_patch_finds_the_value_it_knows(model):
    """Of several sequences, too: `scale` takes nothing with gaps."""
    found = []
    for options in (PLAIN, BY_ROWS):
        with model.session(n_ctx=512, n_seq_max=2, graph=options) as s, s.patch("conv_output_raw-1", lambda g, x: g.scale(x, 0.5)):
            found.append(np.concatenate([s.decode(TEXT[:70]), *s.decode_batch({0: TEXT[:66], 1: TEXT[5:71]}).values()], axis=None))
    assert nmse(found[1], found[0]) < TOLERANCE


def test_devices_that_are_no_cpu_keep_columns():
    gpu = type("Gpu", (), {"kind": "gpu"})()
    cpu = ggml.device("CPU")
    assert [LEAN.for_session("f16", 1, d).conv_by_rows for d in ([cpu], [cpu, cpu], [gpu], [cpu, gpu])] == [True, True, False, False]


def test_a_window_that_is_lost_is_seen(model, plain, monkeypatch):
    """The mutation: the old rows come after the write that replaces them."""
    rows = conv._rows

    def late(g, *more):
        expand = g.expand
        monkeypatch.setattr(g, "expand", lambda x: None if x.op == "CONT" else expand(x))
        out = rows(g, *more)
        monkeypatch.setattr(g, "expand", expand)
        return out

    monkeypatch.setattr(conv, "_rows", late)
    assert nmse(answers(model, BY_ROWS.but(state_view=True)), plain) > 100 * TOLERANCE


def test_old_rows_one_token_late_are_seen(model, plain, monkeypatch):
    at = ggml.Ops.set_inplace
    monkeypatch.setattr(GraphBuilder, "set_inplace",
                        lambda self, a, b, nb1, nb2, nb3, offset: at(self, a, b, nb1, nb2, nb3, nb1), raising=False)  # fmt: skip
    assert nmse(answers(model, BY_ROWS), plain) > 100 * TOLERANCE
