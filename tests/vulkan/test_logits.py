"""CPU against Vulkan0 over the same libggml: logits of whole models, prompts around the sizes of kernels, decoding after them."""

import numpy as np
import pytest

from qwen3next_ggml.graph.options import PLAIN
from tests.kit import assert_same_greedy, nmse, top2_gap

from .conftest import DEVICE, both, decode, tokens

LIMIT = 1e-4
AFTER = (5, 6, 7)


@pytest.mark.parametrize("n", [1, 65, 513])
def test_a_toy(t0, n):
    (prompt, after), (prompt_there, after_there) = t0.run(tokens(t0.cpu, n), AFTER)
    assert nmse(prompt_there, prompt) <= LIMIT and nmse(after_there, after) <= LIMIT
    # one row for another is a hundred times further off than the limit
    assert nmse(after_there[::-1], after) > 100 * LIMIT


@pytest.fixture(scope="module")
def bard_both(bard_f32):
    return both(bard_f32)


@pytest.mark.parametrize("n", [1, 65, 513])
def test_bard(bard_both, n):
    (prompt, after), (prompt_there, after_there) = bard_both.run(tokens(bard_both.cpu, n), AFTER)
    assert nmse(prompt_there, prompt) <= LIMIT and nmse(after_there, after) <= LIMIT
    assert nmse(after_there[::-1], after) > 100 * LIMIT


def test_greedy_text(bard_both):
    prompt = bard_both.cpu.tokenizer.encode("My lord, the king of England is come.")
    texts, gaps = [], []
    for model in (bard_both.vulkan, bard_both.cpu):
        with model.session(n_ctx=256, graph="plain") as s:
            rows = [s.decode(prompt)[0]]
            for _ in range(23):
                rows.append(s.decode([int(rows[-1].argmax())])[0])
        texts.append([int(row.argmax()) for row in rows])
        gaps.append([top2_gap(row) for row in rows])
    assert_same_greedy(*texts, gaps[1])
    assert len(set(texts[0])) > 5


@pytest.mark.parametrize("options", [{"delta_net": "chunked"}, {"flash_attn": False}, {"n_ubatch": 9}, {"n_rollback": 3}], ids=str)
def test_other_paths(t0, options):
    """A prompt cut or computed otherwise, against the CPU's usual way."""
    ids = tokens(t0.cpu, 20)
    here, there = decode(t0.cpu, ids, AFTER), decode(t0.vulkan, ids, AFTER, **options)
    assert nmse(np.concatenate(there), np.concatenate(here)) <= LIMIT


def test_several_sequences(t0):
    a, b = tokens(t0.cpu, 12), tokens(t0.cpu, 10)
    found = []
    for model in (t0.cpu, t0.vulkan):
        with model.session(n_ctx=256, n_seq_max=2, graph="plain") as s:
            rows = [s.decode_batch({0: a, 1: b}, logits="all"), s.decode_batch({0: [1], 1: [2]}), s.decode_batch({1: [3]})]
        found.append(np.concatenate([part for row in rows for _, part in sorted(row.items())]))
    assert nmse(found[1], found[0]) <= LIMIT


def test_lean_graphs_run_there_too(t0):
    """Not chosen by itself on a GPU, but asked for it computes the same."""
    ids = tokens(t0.cpu, 12)
    with t0.vulkan.session(n_ctx=256, graph="lean") as s, t0.cpu.session(n_ctx=256, graph="lean") as r:
        got, want = (np.concatenate([x.decode(ids, logits="all"), *(x.decode([t]) for t in AFTER)]) for x in (s, r))
    assert nmse(got, want) <= LIMIT


def test_the_device_is_chosen(t0):
    with t0.vulkan.session(n_ctx=256) as s:
        assert s.options == PLAIN.but(finite_kv=True) and s.options.flash_attn
        assert s.graphs.executor.backend.device.name == DEVICE
