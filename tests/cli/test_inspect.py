"""`qgraph inspect` against gguf-py's reading of the same file, and what it must not do."""

import json
import os

import gguf
import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.gguf_file import GgufFile, KeyValues
from qwen3next_ggml.toy import write_toy
from tests.kit import run_python
from tests.kit.gguf_bytes import edit_gguf, tensor, u64

N_TOKENS, N_MERGES = 151936, 151387

MEASURED = """
import sys, time
from qwen3next_ggml.cli import cli
cli(["inspect", sys.argv[1], "--json"], standalone_mode=False)
seconds = time.process_time()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(seconds, int(peak) / 1024, "tokenizers" in sys.modules, file=sys.stderr)
"""


def add_sparse_tensor(path, nbytes):
    """Give a file one more F32 tensor, a hole of nbytes that takes no room on the disk."""
    with GgufFile.open(path) as file:
        infos = list(file.tensors.values())
    raw, last, start = path.read_bytes(), infos[-1], min(info.offset for info in infos)
    table_end = raw.rindex(last.name.encode(), 0, start) + len(last.name) + 4 + 8 * len(last.ne) + 4 + 8
    data = raw[start:]
    data += bytes(-len(data) % 32)
    head = raw[:8] + u64(len(infos) + 1) + raw[16:table_end] + tensor("hole", (nbytes // 4,), offset=len(data))
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    os.truncate(path, path.stat().st_size + nbytes)


def report(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_totals_are_those_of_the_file(qgraph, bard):
    got = report(qgraph("inspect", "--json"))
    theirs = {t.name: t for t in gguf.GGUFReader(bard).tensors}
    assert [t["name"] for t in got["tensors"]] == list(theirs)
    for ours in got["tensors"]:
        other = theirs[ours["name"]]
        assert ours["shape"] == other.shape.tolist()
        assert (ours["type"], ours["nbytes"]) == (other.tensor_type.name.lower(), int(other.n_bytes))
    assert got["n_params"] == sum(int(t.n_elements) for t in theirs.values())
    for key in ("role", "type"):
        assert sum(sums["nbytes"] for sums in got[f"by_{key}"]) == got["nbytes"] == sum(int(t.n_bytes) for t in theirs.values())
    assert got["hparams"]["recurrent_layers"] == [il % 4 != 3 and il < 8 for il in range(9)]
    assert got["leftovers"] == [] and got["error"] is None


def test_types_are_grouped_by_role(qgraph, bard):
    """C10: gates, convolution, norms, experts and the NextN block can be told apart, each with its types."""
    types = {}
    for found in report(qgraph("inspect", bard, "--json"))["tensors"]:
        types.setdefault(found["role"], set()).add(found["type"])
    assert types["conv"] == types["norm"] == types["router"] == {"f32"}
    assert types["expert"] == types["shared expert"] == types["linear attention"] == {"q8_0"}
    assert types["gate"] == types["mtp"] == {"f32", "q8_0"}
    assert None not in types
    lines = [line.split() for line in qgraph("inspect", bard).stdout.splitlines()]
    assert ["gate", "26", "10.80", "K", "15.75", "KiB", "20", "x", "f32,", "6", "x", "q8_0"] in lines


def test_text_shows_every_tensor_once(qgraph, toys):
    text = qgraph("inspect", toys.mtp).stdout
    for theirs in gguf.GGUFReader(toys.mtp).tensors:
        [line] = [line for line in text.splitlines() if line.split()[:1] == [theirs.name]]
        assert f"[{', '.join(map(str, theirs.shape))}]" in line and "f32" in line
    assert "  0  r r r a n\n" in text
    assert "\nlayer 3, attention\n" in text and "\nlayer 4, nextn\n" in text


def test_leftovers_and_notes_are_listed(qgraph, toys, tmp_path):
    path = tmp_path / "more.gguf"
    edit_gguf(toys.t0, path, rename={"output.weight": "blk.1.surprise.weight"})
    with open(path, "ab") as file:
        file.write(bytes(4096))
    result = qgraph("inspect", path)
    assert result.exit_code == 0
    assert "\nleftovers\n  blk.1.surprise.weight\n" in result.stdout
    assert "more.gguf: 4096 bytes after the last tensor" in result.stdout
    assert report(qgraph("inspect", path, "--json"))["leftovers"] == ["blk.1.surprise.weight"]


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(metadata={"general.architecture": "kimi-linear"}), "no graph for architecture 'kimi-linear', supported: qwen3next"),
        (dict(drop={"blk.2.ssm_conv1d.weight"}), "missing 1 tensor: blk.2.ssm_conv1d.weight [4, 320]"),
        (dict(replace={"blk.1.ssm_norm.weight": ("f32", np.ones(31))}), "blk.1.ssm_norm.weight has shape [31], wanted [32]"),
    ],
)
def test_a_file_that_cannot_run_is_shown_all_the_same(qgraph, toys, tmp_path, changes, words):
    path = tmp_path / "broken.gguf"
    edit_gguf(toys.t0, path, **changes)
    result = qgraph("inspect", path, "--json")
    assert result.exit_code == 1
    assert words in result.stderr and result.stderr.count("\n") == 1
    shown = json.loads(result.stdout)
    assert words in shown["error"]
    assert "blk.3.attn_q.weight" in [t["name"] for t in shown["tensors"]]


def test_big_arrays_are_not_parsed(qgraph, bard, monkeypatch):
    parsed, parse = [], KeyValues._parse
    monkeypatch.setattr(KeyValues, "_parse", lambda self, key, array: parsed.append(key) or parse(self, key, array))
    qgraph("inspect", bard)
    assert parsed == ["qwen3next.attention.recurrent_layers"]


def test_a_large_vocabulary_is_inspected_at_once(tmp_path):
    """C18: under a second and 200 MiB, tokenizer not built, and a gigabyte of weights not touched.

    The second is the processor's, interpreter and imports included: other tests may be running beside this one.
    """
    path = write_toy(tmp_path / "vocab.gguf", n_vocab=N_TOKENS, n_merges=N_MERGES)
    add_sparse_tensor(path, 2**30)
    done = run_python(MEASURED, path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["hparams"]["n_vocab"] == N_TOKENS and shown["leftovers"] == ["hole"]
    assert shown["metadata"]["tokenizer.ggml.merges"] == f"[{N_MERGES} values]"
    seconds, mib, built = done.stderr.split()
    assert float(seconds) < 1 and float(mib) < 200 and built == "False"


def test_how_a_file_would_be_loaded(qgraph, toys):
    """The plan is that of `load`, by bytes, with the reasons; a file that cannot be used has none."""
    path = toys.file(type="q4_0", geometry="tiny-q")
    plan = report(qgraph("inspect", path, "--json"))["load"]
    with q.load(path) as model:
        assert plan["nbytes"] == model.weights.planned and plan["why"] == model.weights.policy.why
        assert sum(plan["nbytes"].values()) == model.weights.planned.total() and plan["nbytes"]["repacked"] > 0
    text = qgraph("inspect", path).stdout
    assert f"how it loads on the CPU, ggml {plan['ggml']}" in text and plan["why"] in text and "repacked as CPU_REPACK" in text
