"""`qgraph parity`: what is printed, and the exit code as the answer."""

import json
import re
from dataclasses import replace

import pytest

from qwen3next_ggml import parity
from qwen3next_ggml.graph import delta_net
from qwen3next_ggml.models import qwen3next
from qwen3next_ggml.parity import ops
from qwen3next_ggml.parity.op_cases import cases

PROMPT = ("-p", "hello world", "-t", 1)


@pytest.fixture
def here(monkeypatch):
    """Both sides run in this process, where a bug can be put in."""
    from qwen3next_ggml.parity import pairs

    monkeypatch.setattr(parity, "record_apart", parity.record)
    monkeypatch.setattr(pairs, "record_apart", parity.record)


@pytest.fixture
def tiled_heads(monkeypatch):
    pair_heads = delta_net.pair_heads
    monkeypatch.setattr(qwen3next, "pair_heads", lambda g, x, H_v, pairing: pair_heads(g, x, H_v, "tiled"))


def document(result):
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("ref", ["llama.cpp", "CPU"])
def test_equal_sides(qgraph, toys, ref):
    """Each in a process of its own."""
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", ref, "--graph", "plain", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("here       CPU, ggml ") and lines[1].startswith(f"reference  {ref}, ggml ")
    assert lines[4] == "no difference above 1e-06"
    assert [line.split()[0] for line in lines[8:12]] == ["0", "1", "2", "3"]
    found = document(result)
    assert found["nodes"] > 200 and found["misses"] == 0 and found["first"] is None and found["worst"] < 1e-6


def test_a_difference(qgraph, toys, here, tiled_heads):
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "float64", "--json")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[4].startswith("first difference: q_conv_predelta-0 #0, NMSE ") and lines[4].endswith(", from ubatch 0 on")
    assert re.fullmatch(r"  RESHAPE of REPEAT \[32, 6, \d+\], made by graph/delta_net.py:\d+", lines[5])
    assert lines[6].startswith("    reads ")
    first = document(result)["first"]
    assert (first["name"], first["kernel"], first["ubatch"]) == ("q_conv_predelta-0", "REPEAT", 0) and first["nmse"] > 1e-3


def test_tolerance_decides(qgraph, toys, here):
    strict = qgraph("parity", toys.t0, *PROMPT, "--ref", "float64", "-fa", "off", "--tolerance", "1e-30")
    assert strict.exit_code == 1 and "no difference above" not in strict.stdout
    assert qgraph("parity", toys.t0, *PROMPT, "--ref", "float64", "-fa", "off", "--tolerance", "1e-9").exit_code == 0


def test_a_recording_is_written_and_compared_with(qgraph, toys, here, tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "plain", "--save", path, "--capture", "l_out-*")
    assert (result.exit_code, result.stderr) == (0, f"wrote {path}\n")
    assert [v.name for v in parity.Recording.load(path).values] == [f"l_out-{il}" for il in range(4)]
    assert qgraph("parity", toys.t0, *PROMPT, "--ref", path).exit_code == 0
    other = qgraph("parity", toys.t0, "-p", "hello there", "--ref", path)
    assert other.exit_code == 1 and other.stderr.startswith("error: the two sides ran other tokens")


def test_sweep(qgraph, toys, here, tiled_heads):
    """Against a reference with the same bug nothing differs, against float64 everything does, at the same node."""
    result = qgraph("parity", toys.t0, "-p", "abc", "-t", 1, "--ref", "float64", "--sweep", "--json")
    assert result.exit_code == 1
    rows = document(result)
    assert {row["first"] for row in rows} <= {"q_conv_predelta-0", "attn_output-0"}
    assert len({(row["flash_attn"], row["n_ubatch"], row["delta_net"], row["graph"]) for row in rows}) == len(rows) >= 12
    assert len(result.stdout.splitlines()) == len(rows) + 2
    assert qgraph("parity", toys.t0, "-p", "abc", "-t", 1, "--ref", "plain", "--sweep").exit_code == 0


@pytest.mark.parametrize("factor, code", [(1.0, 0), (1.1, 1)])
def test_ops(qgraph, monkeypatch, factor, code):
    [case] = [c for c in cases() if c.op == "ssm_conv"][:1]

    def off(g):
        node, pair = case.build(g)
        return node, lambda value: (pair(value)[0] * factor, pair(value)[1])

    monkeypatch.setattr(ops, "cases", lambda: [case, replace(case, build=off)])
    result = qgraph("parity", "--ops", "--json")
    assert result.exit_code == code
    lines = result.stdout.splitlines()
    assert lines[0].split()[0] == "ssm_conv" and lines[0].endswith("  ok")
    assert lines[1].endswith("  MISS" if code else "  ok") and lines[2] == f"2 cases, {code} missed"
    assert [row["verdict"] for row in document(result)] == ["ok", "MISS" if code else "ok"]


@pytest.mark.parametrize("args, said", [
    (("--sweep", "--save", "x"), "exclude each other"), (("--ops", "--sweep"), "exclude each other"), (("-fa", "maybe"), "not one of on, off"),
    ((), "no prompt"), (("-p", "a", "--tolerance", "small"), "not a valid float"),
])  # fmt: skip
def test_usage_errors(qgraph, args, said):
    result = qgraph("parity", *args)
    assert result.exit_code == 2 and said in result.stderr


def test_a_device_that_is_not_there(qgraph, toys):
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "CUDA7", "--json")
    assert result.exit_code == 1 and result.stderr.startswith("error: no device CUDA7; ") and result.stdout == ""


def test_llama_cpp_is_optional(qgraph, toys, monkeypatch):
    """A reader without llama-cpp-python is told what to install."""
    import sys

    monkeypatch.setattr(parity, "record_apart", parity.record)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "llama.cpp")
    assert result.exit_code == 1 and "pip install 'qwen3next_ggml[parity]'" in result.stderr and result.stderr.count("\n") == 1
