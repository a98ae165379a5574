"""The llama.cpp child against llama-cpp-python's own high-level class, and its nodes against each other."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from tests.kit.llama_api import LlamaOptions
from tests.kit.llama_child import LlamaChildError, LlamaJob, run_llama

BARD = str(Path(__file__).parents[2] / "qwen3next_ggml/data/bard.gguf")
TOKENS = [(7 * i + 3) % 2000 for i in range(70)]

HIGH_LEVEL = """
import json, sys, numpy as np, llama_cpp
path, tokens, out = json.loads(sys.argv[1])
llama = llama_cpp.Llama(path, n_ctx=512, n_threads=2, n_threads_batch=2, logits_all=True, verbose=False)
llama.eval(tokens)
np.save(out, llama.scores[:len(tokens)])
"""


def batch(tokens, *, start=0, seq=0):
    return tuple((token, start + i, seq, True) for i, token in enumerate(tokens))


@pytest.fixture(scope="module")
def recorded():
    job = LlamaJob(model=BARD, steps=(batch(TOKENS), batch([5], start=70)), capture=("*",), options=LlamaOptions(n_ubatch=48))
    return run_llama(job)


def node_of(result, name, occurrence=0, *, step=0, ubatch=0):
    [node] = [n for n in result.nodes if (n.name, n.occurrence, n.step, n.ubatch) == (name, occurrence, step, ubatch)]
    return node


def test_logits_equal_the_high_level_class(tmp_path):
    out = tmp_path / "scores.npy"
    subprocess.run([sys.executable, "-c", HIGH_LEVEL, json.dumps([BARD, TOKENS, str(out)])], check=True, timeout=120)
    job = LlamaJob(model=BARD, steps=(batch(TOKENS),), options=LlamaOptions(type_k="f16", type_v="f16", repack=True))
    [logits] = run_llama(job).logits
    expected = np.load(out)
    assert logits.shape == expected.shape == (70, 2048)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    # a shift by one position would go unnoticed if all rows were alike
    assert np.abs(logits[1:] - expected[:-1]).max() > 1


def test_steps_and_ubatches_are_told_apart(recorded):
    graphs = {(n.step, n.ubatch) for n in recorded.nodes}
    assert graphs == {(0, 0), (0, 1), (1, 0)}
    assert [node_of(recorded, "l_out-0", step=s, ubatch=u).ne[1] for s, u in sorted(graphs)] == [48, 22, 1]
    joined = np.concatenate([node_of(recorded, "result_output", ubatch=u).array[0, 0] for u in (0, 1)])
    np.testing.assert_array_equal(joined, recorded.logits[0])


def test_nodes_are_read_in_element_order(recorded):
    """The last norm recomputed from its input, and a transposed view against the tensor it views."""
    x = node_of(recorded, "l_out-7").array.astype(np.float64)
    weight = next(t for t in GGUFReader(BARD).tensors if t.name == "output_norm.weight").data
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(node_of(recorded, "h_nextn").array, expected, rtol=1e-4, atol=1e-5)
    mixed = node_of(recorded, "linear_attn_qkv_mixed-0").array
    transposed = node_of(recorded, "qkv_mixed_transposed-0").array
    assert mixed.shape == (1, 1, 48, 512) and np.ptp(mixed) > 0
    np.testing.assert_array_equal(transposed, mixed.swapaxes(-1, -2))


def test_inputs_and_repeated_names_are_recorded(recorded):
    tokens = node_of(recorded, "inp_tokens", ubatch=1)
    assert tokens.op == "NONE" and tokens.array.ravel().tolist() == TOKENS[48:]
    mask = node_of(recorded, "attn_inp_kq_mask", step=1).array[0, 0, 0]
    assert (mask[:71] == 0).all() and (mask[71:] == -np.inf).all()
    assert {n.occurrence for n in recorded.nodes if n.name == "norm-0"} == {0, 1, 2}


@pytest.mark.parametrize("kind, nmse_limit", [("f16", 1e-6), ("bf16", 1e-4), ("q8_0", 1e-3)])
def test_cache_nodes_of_every_type_are_readable(kind, nmse_limit):
    """K as stored in the cache is the roped K, up to the cache type's rounding."""
    options = LlamaOptions(type_k=kind, type_v=kind, flash_attn=True)
    job = LlamaJob(model=BARD, steps=(batch(TOKENS),), capture=("cache_k_l3 (view)", "Kcur-3"), options=options)
    result = run_llama(job)
    stored = node_of(result, "cache_k_l3 (view)").array.reshape(-1, 128)[:70]
    written = node_of(result, "Kcur-3", 1).array.reshape(-1, 128)
    error = ((stored - written) ** 2).sum() / (written**2).sum()
    assert 0 < error <= nmse_limit


def test_greedy_tokens_are_the_argmax_of_the_logits():
    greedy = run_llama(LlamaJob(model=BARD, greedy_prompt=tuple(TOKENS[:5]), n_greedy=4))
    fed = TOKENS[:5] + greedy.greedy[:3]
    [logits] = run_llama(LlamaJob(model=BARD, steps=(batch(fed),))).logits
    assert greedy.greedy == logits[4:].argmax(-1).tolist()
    top = np.sort(logits[4:], axis=-1)
    np.testing.assert_allclose(greedy.greedy_gaps, top[:, -1] - top[:, -2], atol=1e-3)


def test_tokenize_parses_special_tokens_where_asked():
    texts = ("To be <|im_end|>", "")
    plain = run_llama(LlamaJob(model=BARD, texts=texts)).ids
    special = run_llama(LlamaJob(model=BARD, texts=texts, parse_special=True)).ids
    assert plain[1] == special[1] == []
    assert 2047 in special[0] and 2047 not in plain[0]


def test_a_failing_child_says_why(tmp_path):
    with pytest.raises(LlamaChildError, match="cannot load"):
        run_llama(LlamaJob(model=str(tmp_path / "missing.gguf"), texts=("x",)))
    with pytest.raises(LlamaChildError, match="did not finish"):
        run_llama(LlamaJob(model=BARD, texts=("x",)), timeout=0.01)
