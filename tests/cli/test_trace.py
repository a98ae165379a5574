"""`qgraph trace`: shapes on stdout, values in the file."""

import json

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.trace import read_trace


def test_a_prompt_is_traced(qgraph, bard, tmp_path):
    path = tmp_path / "t.safetensors"
    result = qgraph("trace", "-p", "To be, or not to be", "--capture", "l_out-*", "--capture", "attn_norm-3", "-ub", 4, "-o", path, "--json")
    assert result.exit_code == 0, result.stderr
    about, arrays = read_trace(path)
    with q.load(bard, n_threads=1) as model, model.session(n_ctx=256, n_ubatch=4) as s, s.capture("l_out-5", "attn_norm-3") as t:
        tokens = model.tokenizer.encode("To be, or not to be")
        s.decode(tokens)
    assert arrays["tokens"].tolist() == tokens and len(tokens) > 4
    assert np.array_equal(arrays["l_out-5"], t["l_out-5"]) and np.array_equal(arrays["attn_norm-3"], t["attn_norm-3"])
    lines = result.stdout.splitlines()
    shapes = {name: list(x.shape) for name, x in arrays.items()}
    assert json.loads(lines[-1]) == {"path": str(path), "n_tokens": len(tokens), "shapes": shapes}
    assert {line.split()[0] for line in lines[:-1]} == {f"l_out-{il}" for il in range(8)} | {"attn_norm-3", "tokens"}
    assert about["model"] == "bard.gguf"


def test_every_layer_without_being_asked(qgraph, tmp_path):
    assert qgraph("trace", "-o", tmp_path / "t", stdin="piped").exit_code == 0
    assert set(read_trace(tmp_path / "t")[1]) == {f"l_out-{il}" for il in range(8)} | {"tokens"}


def test_a_name_that_is_not_there(qgraph, tmp_path):
    result = qgraph("trace", "-p", "hi", "--capture", "l_outt-3", "-o", tmp_path / "t")
    assert (result.exit_code, result.stdout) == (1, "") and "no node is named l_outt-3; close to it are" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args, words", [(("-p", "hi"), "Missing option '-o'"), (("-o", "x"), "no prompt")])
def test_usage(qgraph, args, words):
    result = qgraph("trace", *args)
    assert result.exit_code == 2 and words in result.stderr
