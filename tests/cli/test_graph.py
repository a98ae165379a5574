"""`qgraph graph`: every format is valid, nothing but metadata is touched, and a published shape needs no file (C52)."""

import csv
import io
import json
import os
import time
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml import ggml
from qwen3next_ggml.geometry import model_of
from qwen3next_ggml.gguf_file import GgufFile
from qwen3next_ggml.tensors import weights
from qwen3next_ggml.toy import _add_value

PARSERS = {
    "csv": lambda text: len(list(csv.DictReader(io.StringIO(text)))),
    "dot": lambda text: sum("label=" in line and "color=white" not in line and "subgraph" not in line for line in text.splitlines()),
    "json": lambda text: sum(node["id"].isdigit() for node in json.loads(text)["graphs"][0]["nodes"]),
}


def output(result):
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def no_data(monkeypatch):
    """Whoever reads a tensor or asks for memory fails."""

    def refuse(*_, **__):
        raise AssertionError("a tensor was read or given memory")

    monkeypatch.setattr(GgufFile, "data", refuse)
    monkeypatch.setattr(ggml.Device, "buffer_from_host", refuse)
    for place in (ggml.BufferType, weights.ggml):
        monkeypatch.setattr(place, "alloc" if place is ggml.BufferType else "alloc_tensors", refuse)


@pytest.mark.parametrize("format_", ["csv", "dot", "json"])
def test_formats_hold_the_same_layer(qgraph, toys, no_data, format_):
    counted = json.loads(output(qgraph("graph", toys.t0, "--layer", 1, "--stats", "--format", "json")))["nodes"]
    text = output(qgraph("graph", toys.t0, "--layer", 1, "--format", format_))
    n_outside = 1 if format_ == "json" else 0
    assert PARSERS[format_](text) == counted + n_outside
    assert text == output(qgraph("graph", toys.t0, "--layer", 1, "--format", format_))


def test_text_has_what_there_is_to_know(qgraph, toys, no_data):
    title, header, *lines = output(qgraph("graph", toys.t0, "--layer", 3)).splitlines()
    assert title == "qwen3next, 1 token, 256 cells, delta net fused, layer 3"
    assert header.split() == "id layer scope op name type shape device sources read written FLOPs barriers made by".split()
    [line] = [line.split() for line in lines if " attn_output-3 " in line]
    assert line[1:8] == ["3", "attn", "MUL_MAT", "attn_output-3", "f32", "[64]", "CPU"]
    assert line[-1].startswith("graph/linear.py:")


def test_drawings_are_written_to_files(qgraph, toys, tmp_path, no_data):
    for name in ("layer.svg", "all.html"):
        path = tmp_path / name
        result = qgraph("graph", toys.t0, "--layer", 0, "--format", path.suffix[1:], "-o", path)
        assert (result.exit_code, result.stdout) == (0, "") and result.stderr.startswith(f"wrote {path}, ")
    ElementTree.parse(tmp_path / "layer.svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.html", "layer.svg"]
    result = qgraph("graph", toys.t0, "-o", tmp_path / "none" / "x")
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and "No such file" in result.stderr


def test_decode_and_prefill_differ(qgraph, toys, no_data):
    ops = []
    for options in ((), ("--tokens", 512, "--delta-net", "chunked"), ("--graph", "plain")):
        stats = json.loads(output(qgraph("graph", toys.t0, "--stats", "--format", "json", *options)))
        ops.append({group["op"] for group in stats["by_op"]})
        assert sum(group["nodes"] for group in stats["by_scope"]) == stats["nodes"] >= stats["executed"] >= stats["kernels"]
    assert "GATED_DELTA_NET" in ops[0] and "SOLVE_TRI" in ops[1] and "ARGSORT" in ops[2] - ops[0]
    text = output(qgraph("graph", toys.t0, "--stats"))
    assert text.splitlines()[2].split() == "scope nodes executed kernels barriers bytes read bytes written flops".split()
    assert "512 cells" in output(qgraph("graph", toys.t0, "--stats", "-d", 256))


def test_48_layers_without_a_file_in_three_seconds(qgraph, no_data):
    start = time.process_time()
    lines = output(qgraph("graph", "--geometry", "qwen3-next-80b", "--type", "q4_k")).splitlines()
    assert time.process_time() - start < 3
    assert len(lines) > 3000 and any(" blk.47.attn_q+attn_k+attn_v.weight, " in line and " q4_k" not in line for line in lines)
    nextn = output(qgraph("graph", "--geometry", "qwen3-next-80b", "--mtp", "--stats"))
    assert nextn.startswith("the NextN block, 1 token")


def test_a_file_of_80_billion_parameters_lists_in_seconds(qgraph, tmp_path, no_data):
    """Its data is a hole that takes no room on the disk."""
    path = tmp_path / "big.gguf"
    with model_of("qwen3-next-80b", type="q4_k") as model:
        writer = gguf.GGUFWriter(path, "qwen3next")
        for key, value in model.file.metadata.items():
            if key != "general.architecture":
                _add_value(writer, key, value)
        for info in model.tensors.values():
            writer.add_tensor_info(info.name, info.ne[::-1], np.dtype(np.float32), info.nbytes, gguf.GGMLQuantizationType(info.type_id))
        nbytes = sum(-(-info.nbytes // 32) * 32 for info in model.tensors.values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + nbytes)
    assert nbytes > 40e9
    start = time.process_time()
    listed = output(qgraph("graph", path))
    assert time.process_time() - start < 3
    assert listed == output(qgraph("graph", "--geometry", "qwen3-next-80b", "--type", "q4_k"))


def test_a_part_of_a_layer(qgraph, toys, no_data):
    whole, part = (list(csv.DictReader(io.StringIO(output(qgraph("graph", toys.t0, "--layer", 3, *more, "--format", "csv")))))
                   for more in ((), ("--scope", "attn")))  # fmt: skip
    assert part == [row for row in whole if row["scope"] == "attn"] and 20 < len(part) < len(whole)
    svg = output(qgraph("graph", toys.t0, "--layer", 3, "--scope", "attn", "--format", "svg"))
    assert "attn_gated-3" in svg and "ffn_moe_up-3" not in svg


@pytest.mark.parametrize("args, n_ctx", [((), 4096), (("-c", 7936), 7936), (("-c", 8000), 8000), (("-c", 0), 0), (("-d", 8192), 8193)], ids=str)
def test_the_listing_is_what_a_session_of_that_context_runs(qgraph, toys, args, n_ctx):
    """A long context is attended to by groups of heads, a short one by the fused op; 0 is what the model was trained on, a short one here."""
    listed = list(csv.DictReader(io.StringIO(output(qgraph("graph", toys.t0, *args, "--format", "csv")))))
    with q.load(toys.t0, n_threads=1) as model, model.session(n_ctx=n_ctx) as s:
        run = s.graph(1)
        long = s.n_ctx >= 8192
    assert [(row["op"], row["name"]) for row in listed] == [(node.op, node.name) for node in run.nodes]
    assert ("FLASH_ATTN_EXT" in {row["op"] for row in listed}) is not long


def test_what_cannot_be_shown(qgraph, toys):
    for args, code, words in (
        (("--layer", 4), 1, "error: layer 4 has no nodes in this graph, which has layers 0 to 3\n"),
        (("--scope", "att"), 1, "error: no nodes of scope 'att' here; there are embd, "),
        (("--layer", 3, "--scope", "delta-net"), 1, "error: no nodes of scope 'delta-net' here; there are attn, "),
        (("--mtp",), 1, "error: this model has no NextN block\n"),
        (("--geometry", "tiny"), 2, "a model and --geometry were given"),
        (("--stats", "--format", "svg"), 2, "--stats is written as text or json, not as svg"),
        (("-c", 256, "-d", 256), 1, "error: a context of 256 tokens does not hold the 257 that --n-depth and --tokens come to\n"),
        (("--tokens", 0), 2, "Invalid value for '--tokens'"),
    ):
        result = qgraph("graph", toys.t0, *args)
        assert (result.exit_code, result.stdout) == (code, "") and words in result.stderr
    result = qgraph("graph", "--geometry", "nonesuch")
    assert result.exit_code == 1 and result.stderr == "error: geometry 'nonesuch', expected one of tiny, tiny-q, qwen3-next-80b\n"
