"""`qgraph parity`: what is printed, and the exit code as the answer."""

import importlib.util
import json
import pathlib
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from qwen3next_ggml import parity
from qwen3next_ggml.cli import parity as cli_parity
from qwen3next_ggml.graph import delta_net
from qwen3next_ggml.models import qwen3next
from qwen3next_ggml.parity import ops, pairs
from qwen3next_ggml.parity.op_cases import cases
from qwen3next_ggml.parity.plot import OFF
from tests.kit import run_python

PROMPT = ("-p", "hello world", "-t", 1)


@pytest.fixture
def here(monkeypatch):
    """Both sides run in this process, where a bug can be put in."""
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
    assert [row["layer"] for row in found["layers"]] == [None, 0, 1, 2, 3]
    assert sum(row["nodes"] for row in found["layers"]) == found["nodes"]
    assert max(row["worst"] for row in found["layers"]) == found["worst"] and all(row["node"] for row in found["layers"])
    assert (found["only_here"], found["only_there"], found["unlike"]) == ([], [], [])


def test_a_difference(qgraph, toys, here, tiled_heads):
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "float64", "--graph", "plain", "--json")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[4].startswith("first difference: q_conv_predelta-0 #0, NMSE ") and lines[4].endswith(", from ubatch 0 on")
    assert re.fullmatch(r"  RESHAPE of REPEAT \[32, 6, \d+\], made by graph/delta_net.py:\d+", lines[5])
    assert lines[6].startswith("    reads ")
    first = document(result)["first"]
    assert (first["name"], first["occurrence"], first["layer"]) == ("q_conv_predelta-0", 0, 0)
    assert (first["op"], first["kernel"]) == ("RESHAPE", "REPEAT")
    assert first["ubatch"] == 0 and first["nmse"] > 1e-3 and first["line"].startswith("graph/delta_net.py:") and first["ne"][:2] == [32, 6]
    assert [list(x) for x in first["inputs"]] == [["name", "ne"]] and first["inputs"][0]["ne"][0] == 32


def test_a_quantised_weight_behind_a_difference_is_named(qgraph, bard, toys, here):
    """Its kernel rounds, which is no bug; a product of others, or an op that multiplies nothing, has no such excuse."""
    result = qgraph("parity", bard, *PROMPT, "--ref", "float64", "--graph", "plain", "--tolerance", "1e-5", "--json")
    first = document(result)["first"]
    assert result.exit_code == 1 and (first["name"], first["kernel"]) == ("linear_attn_qkv_mixed-0", "MUL_MAT")
    assert first["quantised"] == {"name": "blk.0.attn_qkv.weight", "type": "q8_0"}
    [line] = [line for line in result.stdout.splitlines() if "8 bits" in line]
    assert line.startswith("  blk.0.attn_qkv.weight is q8_0: kernels may round ") and line.endswith("--ref float64 does not")
    exact = qgraph("parity", bard, *PROMPT, "--ref", "float64", "--graph", "plain", "--tolerance", "1e-16", "--json")
    assert document(exact)["first"]["kernel"] == "RMS_NORM" and document(exact)["first"]["quantised"] is None
    whole = qgraph("parity", toys.t0, *PROMPT, "--ref", "float64", "--graph", "plain", "--tolerance", "1e-16", "--capture", "*qkv_mixed*", "--json")
    first = document(whole)["first"]
    assert (first["kernel"], first["quantised"]) == ("MUL_MAT", None) and "8 bits" not in whole.stdout


def test_the_op_that_differs_becomes_a_script(qgraph, toys, here, tiled_heads, tmp_path, monkeypatch):
    import sys

    from qwen3next_ggml.parity.extract import extract

    monkeypatch.setattr(sys.modules["qwen3next_ggml.parity.shrink"], "extract_apart", extract)
    path = tmp_path / "op.py"
    how = (toys.t0, *PROMPT, "--ref", "float64", "--graph", "plain", "-fa", "off", "--shrink", path)
    result = qgraph("parity", *how)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"wrote {path} and {path.with_suffix('.safetensors')}, ") and result.stderr.endswith(f"python {path}\n")
    text = path.read_text()
    assert "REPEAT behind q_conv_predelta-0 #0" in text and "y = g.repeat_4d(a, 32, " in text and "g.part(y, " not in text
    done = run_python("import runpy, sys\nsys.argv[:] = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')", path)
    assert done.returncode == 1 and done.stdout.startswith("REPEAT [32, ") and done.stderr == ""


def test_a_picture_has_a_dot_for_every_node(qgraph, toys, here, tiled_heads, tmp_path):
    path = tmp_path / "nodes.svg"
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "float64", "--plot", path, "--json")
    found, svg = document(result), ElementTree.parse(path).getroot()
    tag = "{http://www.w3.org/2000/svg}"
    dots = [circle for circle in svg.iter(f"{tag}circle") if circle.get("r") == "2"]
    assert (result.exit_code, result.stderr, len(dots)) == (1, f"wrote {path}\n", found["nodes"])
    assert sum(dot.get("fill") == OFF for dot in dots) == found["misses"] > 10
    assert [text.text for text in svg.iter(f"{tag}text") if text.get("font-weight")] == ["q_conv_predelta-0"]
    # what is further off lies higher
    heights = {dot.find(f"{tag}title").text.split(": ")[1]: float(dot.get("cy")) for dot in dots}
    exact = sorted((float(off), -y) for off, y in heights.items() if off.endswith(tuple("0123456789")))
    assert [y for _, y in exact] == sorted(y for _, y in exact) and exact[0][1] < exact[-1][1]


def test_equal_sides_give_no_script(qgraph, toys, here, tmp_path):
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "plain", "--shrink", tmp_path / "op.py")
    assert (result.exit_code, result.stderr, list(tmp_path.iterdir())) == (0, "no node differs, so there is no op to write\n", [])


def test_a_trace_and_a_folder_are_references(qgraph, toys, tmp_path):
    """The trace takes the prompt as one batch, and the run that is examined then does so too."""
    path = tmp_path / "t.safetensors"
    how = ("-p", "hello world", "--graph", "plain", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", 1)
    assert qgraph("trace", toys.t0, *how, "--capture", "*-*", "-o", path).exit_code == 0
    result = qgraph("parity", toys.t0, *how, "--ref", path, "--json")
    assert result.exit_code == 0 and "reference  t.safetensors, a trace of toy-" in result.stdout and document(result)["nodes"] > 150
    folder = pathlib.Path(importlib.util.find_spec("llama_cpp").submodule_search_locations[0]) / "lib"
    result = qgraph("parity", toys.t0, *how, "--ref", folder)
    assert result.exit_code == 0 and f"reference  llama.cpp of {folder}, ggml 0.25.3" in result.stdout


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
    """Every variant has the bug, and all show it at the same place."""
    result = qgraph("parity", toys.t0, "-p", "abc", "-t", 1, "--ref", "float64", "--sweep", "--json")
    assert result.exit_code == 1
    rows = document(result)
    assert {row["first"] for row in rows} <= {"q_conv_predelta-0", "attn_output-0"}
    assert len({(row["flash_attn"], row["n_ubatch"], row["delta_net"], row["graph"]) for row in rows}) == len(rows) >= 12
    assert len(result.stdout.splitlines()) == len(rows) + 2


def test_a_sweep_that_finds_nothing(qgraph, toys, here):
    result = qgraph("parity", toys.t0, "-p", "abc", "-t", 1, "--ref", "plain", "--sweep")
    assert result.exit_code == 0 and {line.split()[-1] for line in result.stdout.splitlines()[1:]} == {"-"}


def test_a_sweep_over_what_is_asked_for(qgraph, toys):
    """Each libggml in a process of its own; a column for what varies."""
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "float64", "-fa", "off", "--sweep", "ggml,graph", "--json")
    assert result.exit_code == 0
    lines, rows = result.stdout.splitlines(), document(result)
    assert lines[0].split() == ["ggml", "graph", "nodes", "worst", "first", "difference"]
    assert {(row["ggml"], row["graph"]) for row in rows} == {(g, graph) for g in parity.providers() for graph in ("plain", "lean")}
    assert len(rows) == len(lines) - 2 and all(line.split()[0] in parity.providers() for line in lines[1:-1])
    worst = {row["ggml"]: row["worst"] for row in rows if row["graph"] == "plain"}
    assert len(set(worst.values())) > 1, "two libggml that round alike everywhere are one"


def test_the_axes_of_the_command_are_those_of_a_sweep():
    assert cli_parity.AXES == pairs.AXES


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


def test_what_float16_allows_is_counted_and_is_no_miss(qgraph, monkeypatch):
    rows = [ops.OpResult("mul_mat", "a", 3e-14, 1e-6, ops.OK), ops.OpResult("mul_mat", "b", 5e-6, 1e-6, ops.HALF, "above 1e-06, as float16 gives")]
    monkeypatch.setattr(ops, "check_ops", lambda *_, **__: iter(rows))
    result = qgraph("parity", "--ops", "--json")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines[1].endswith("  5.0e-06  float16: above 1e-06, as float16 gives")
    assert lines[2] == "2 cases, 0 missed, 1 in float16" and document(result)[1]["verdict"] == "float16"


@pytest.mark.parametrize("args, said", [
    (("--sweep", "--save", "x"), "exclude each other"), (("--ops", "--sweep"), "exclude each other"), (("-fa", "maybe"), "not one of on, off"),
    (("--sweep", "--shrink", "x.py"), "exclude each other"), (("--ops", "--plot", "x.svg"), "exclude each other"),
    (("-p", "a", "--shrink", "x.txt"), "does not end in .py"),
    (("-p", "a", "--sweep", "speed"), "'speed' is not one of 'ubatch'"),
    ((), "no prompt"), (("-p", "a", "--tolerance", "small"), "not a valid float"),
])  # fmt: skip
def test_usage_errors(qgraph, args, said):
    result = qgraph("parity", *args)
    assert result.exit_code == 2 and said in result.stderr


@pytest.mark.parametrize("args, said", [
    (("--ref", "CUDA7"), "no device CUDA7; ggml provider "), (("--device", "CUDA7"), "no device CUDA7; ggml provider "),
    (("--ref", "llama.ccp"), "no device llama.ccp; ggml provider "), (("--ref", "none/t.st"), "none/t.st: No such file or directory"),
    (("--ref", "tests"), "tests has no libllama: "), (("--ref", "README.md"), "README.md is not a recording or trace: it starts with"),
    (("--ggml", "gmml"), "no ggml provider gmml: "), (("--ref", "CPU", "--ref-ggml", "gmml"), "no ggml provider gmml: "),
])  # fmt: skip
def test_what_is_not_there_is_one_line(qgraph, toys, args, said):
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "plain", *args, "--json")
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.mark.parametrize("sweep", [(), ("--sweep", "graph")], ids=["once", "sweep"])
@pytest.mark.parametrize("args, said", [
    (("--ref", "float64", "--device", "CUDA7"), "no device CUDA7; "), (("--ref", "float64", "--ggml", "gmml"), "no ggml provider gmml: "),
    (("--ref", "CUDA7"), "no device CUDA7; "), (("--ref", "CPU", "--ref-ggml", "gmml"), "no ggml provider gmml: "),
    (("--ref", "llama.cpp", "--device", "CPU,CUDA7"), "no device CUDA7; "),
])  # fmt: skip
def test_both_sides_are_looked_up_before_one_is_computed(qgraph, toys, monkeypatch, args, said, sweep):
    def refuse(run):
        raise AssertionError(f"{run.kind} on {run.device} was computed")

    monkeypatch.setattr(parity, "record_apart", refuse)
    monkeypatch.setattr(pairs, "record_apart", refuse)
    result = qgraph("parity", toys.t0, *PROMPT, *args, *sweep)
    assert (result.exit_code, result.stdout) == (1, "") and result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1


def test_llama_cpp_is_optional(qgraph, toys, monkeypatch):
    """A reader without llama-cpp-python is told what to install."""
    import sys

    monkeypatch.setattr(parity, "record_apart", parity.record)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    result = qgraph("parity", toys.t0, *PROMPT, "--ref", "llama.cpp")
    assert result.exit_code == 1 and "pip install 'qwen3next_ggml[parity]'" in result.stderr and result.stderr.count("\n") == 1
