"""Named values of many tokens in a file."""

import json
import tracemalloc

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.array_file import read_arrays
from qwen3next_ggml.errors import GraphError, StateError
from qwen3next_ggml.trace import read_trace, write_trace
from tests.kit import max_abs, reference_of, run_python

TOKENS = np.random.default_rng(3).integers(0, 97, 40).tolist()
F32 = dict(n_ctx=256, type_k="f32", type_v="f32")
NAMES = ("l_out-*", "Kcur-3", "q_conv-1", "new_state-0", "ffn_moe_topk-2", "result_norm")


@pytest.fixture(scope="module")
def model(toys):
    with q.load(toys.t0, n_threads=1) as model:
        yield model


def test_a_trace_holds_what_capture_gives(model, tmp_path):
    """Ubatch by ubatch to disk, the arrays are those of one block in memory, a repeated name told apart."""
    path = tmp_path / "t.safetensors"
    with model.session(**F32, n_ubatch=16) as s:
        shapes = write_trace(s, TOKENS, path, *NAMES)
    with model.session(**F32, n_ubatch=16) as s, s.capture(*NAMES) as t:
        s.decode(TOKENS, logits="all")
    about, arrays = read_trace(path)
    assert {name.partition("#")[0] for name in arrays} == {*t, "tokens"} and arrays["tokens"].tolist() == TOKENS
    assert {name: x.shape for name, x in arrays.items()} == shapes
    for name in arrays.keys() - {"tokens"}:
        assert np.array_equal(arrays[name], t[name]), name
    assert arrays["l_out-3"].shape == (40, 64) and arrays["Kcur-3#0"].shape == (40, 96) and arrays["new_state-0"].shape == (6, 32, 32)
    assert about["capture"] == list(NAMES) and about["n_tokens"] == 40 and about["options"]["n_ubatch"] == 16
    assert not [p for p in tmp_path.iterdir() if p != path]


def test_values_are_the_references(model, toys, tmp_path):
    reference, rows = reference_of(toys.t0), []
    for token in TOKENS:
        rows.append({})
        reference.decode([token], trace=rows[-1])
    with model.session(**F32, n_ubatch=16) as s:
        write_trace(s, TOKENS, tmp_path / "t", "l_out-2", "result_output")
    _, arrays = read_trace(tmp_path / "t")
    for name in ("l_out-2", "result_output"):
        want = np.stack([np.ravel(row[name]) for row in rows])
        assert max_abs(arrays[name], want) < 1e-4 and max_abs(arrays[name][::-1], want) > 1e-2


def test_other_readers_read_it(model, tmp_path):
    """The container is plain safetensors: a length, a JSON header, the bytes."""
    with model.session(**F32) as s:
        write_trace(s, TOKENS[:5], tmp_path / "t", "l_out-0")
    raw = (tmp_path / "t").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    begin, end = header["l_out-0"]["data_offsets"]
    value = np.frombuffer(raw[8 + n + begin : 8 + n + end], np.float32).reshape(header["l_out-0"]["shape"])
    assert np.array_equal(value, read_arrays(tmp_path / "t")[1]["l_out-0"]) and header["l_out-0"]["dtype"] == "F32"


def test_memory_does_not_grow_with_the_text(model, tmp_path):
    """Four times the tokens, the same peak; the file itself is larger than that."""

    def peak(n):
        with model.session(n_ctx=1024, n_ubatch=32) as s:
            write_trace(s, [1] * 32, tmp_path / "warm", "l_out-*", "ffn_moe_*")
            s.clear()
            tracemalloc.start()
            try:
                write_trace(s, [1] * n, tmp_path / "t", "l_out-*", "ffn_moe_*")
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    few, many = peak(128), peak(512)
    assert (tmp_path / "t").stat().st_size > 8e6
    assert many < few + 1.5e6


RESIDENT = """
import os, pathlib, re, sys
import qwen3next_ggml as q
from qwen3next_ggml.trace import write_trace
_, model, path, hold = sys.argv
names = ("l_out-*", "ffn_moe_*", "linear_attn_*", "conv_output_*", "q_conv*", "z-*")
# getrusage still counts what the parent had when it forked
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) // 1024
with q.load(model, n_threads=1) as m, m.session(n_ctx=2304, n_ubatch=64) as s:
    write_trace(s, [1] * 64, path, *names)
    s.clear()
    before = peak()
    if hold == "True":
        with s.capture(*names):
            s.decode([1] * 2048, logits="all")
    else:
        write_trace(s, [1] * 2048, path, *names)
    print(peak() - before, os.path.getsize(path) >> 20)
"""


@pytest.mark.parametrize("hold", [False, True], ids=["trace", "capture"])
def test_what_is_resident_is_a_fraction_of_the_file(toys, tmp_path, hold):
    """As the system counts it, mapped pages included; a capture of the same values holds them all."""
    done = run_python(RESIDENT, toys.t0, tmp_path / "t", hold)
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert grown > 60 if hold else (grown < 20 and size > 70)


def test_what_goes_wrong_leaves_no_file(model, tmp_path):
    with model.session(n_ctx=512, n_ubatch=200, flash_attn=False) as s:
        with pytest.raises(GraphError, match="no node is named l_outt-3; close to it are .*l_out-3"):
            write_trace(s, TOKENS, tmp_path / "t", "l_outt-3")
        with pytest.raises(GraphError, match=r"kq-3 has shape .* it grows with the context"):
            write_trace(s, [1] * 400, tmp_path / "t", "kq-3")
        with pytest.raises(StateError, match="could not be written: No such file or directory"):
            write_trace(s, TOKENS, tmp_path / "nowhere" / "t", "l_out-0")
    assert not list(tmp_path.iterdir()) and not s.probes.captures


def test_a_file_of_another_kind_is_refused(model, tmp_path):
    with model.session(n_ctx=256) as s:
        s.decode(TOKENS[:3])
        s.save(tmp_path / "s")
    with pytest.raises(StateError, match="is not a trace"):
        read_trace(tmp_path / "s")
