"""One op out of a run: alone it gives the same bits as in the graph, and the script of a difference shows that difference."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import OptionError, StateError
from qwen3next_ggml.graph import attention
from qwen3next_ggml.graph.builder import GraphBuilder
from qwen3next_ggml.parity import FLOAT64, OneOp, Run, compare, one_op, record, shrink
from qwen3next_ggml.parity import shrink as shrinking
from qwen3next_ggml.parity.compare import Joined
from qwen3next_ggml.parity.extract import extract
from tests.kit.process import ROOT

TOKENS = tuple(np.random.default_rng(9).integers(0, 97, 12).tolist())
MORE = tuple(np.random.default_rng(10).integers(0, 97, 70).tolist())
VARIANTS = {
    "plain": dict(graph="plain", flash_attn="on"),
    "lean, quantised": dict(path=None, graph="lean", flash_attn="on", type_k="q8_0", type_v="q8_0"),
    "lean, by rows": dict(graph="lean", tokens=MORE),
    "in parts": dict(graph="lean", type_k="f16", type_v="f16"),
    "chunked": dict(graph="plain", delta_net="chunked"),
    "one by one": dict(graph="lean", delta_net="autoregressive"),
}
MOVES = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE"}


@pytest.fixture
def run(toys):
    return Run(path=str(toys.t0), tokens=TOKENS, graph="plain", flash_attn="off", n_threads=1)


@pytest.fixture
def here(monkeypatch):
    """What runs in a child otherwise runs in this process, where a bug can be put in."""
    monkeypatch.setattr(sys.modules[shrinking.__module__], "extract_apart", extract)


def built_by(text):
    """The `build` of a script, without running it."""
    space = {}
    exec(text.rpartition("\nmain(")[0], space)  # noqa: S102
    return space["build"]


def alone(one, tolerance=0.0):
    """Run a script's build in this process → (NMSE here, NMSE to float64 here or None, same)."""
    provider = ggml.provider().name
    build = built_by(one.script(device="CPU", ggml=provider, tolerance=0))
    lines, same = one_op.run(build, one, device="CPU", ggml_name=provider, tolerance=tolerance)
    exact = lines[2].split("NMSE ")
    return float(lines[1].split()[-1]), float(exact[1].split()[0]) if exact[1:] else None, same


def kinds(recording):
    """One value of every kernel in the first and the last ubatch, the view that names it told apart."""
    n, seen = len(recording.ubatches), {}
    for value in recording.values:
        for ubatch in (0, n - 1):
            there = ubatch in (value.present or range(n)) and (value.how != "last" or ubatch == n - 1)
            if there and value.kernel not in ("", *MOVES):
                seen.setdefault((value.kernel, value.op, ubatch), (value, ubatch))
    return seen.values()


@pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS)
def test_every_op_alone_gives_the_bits_it_gave_in_the_graph(run, how):
    """Operands with all their gaps and orders, parameters, and the view that is named: all of it is needed for the same bits."""
    here = replace(run, **how)
    ours = record(here)
    found = list(kinds(ours))
    for value, ubatch in found:
        one = extract(here, value.name, value.occurrence, ubatch)
        want = shrinking_value(Joined(value, value, ubatch, 0.0), one, ours, ours)
        off, exact, same = alone(replace(one, arrays={**one.arrays, one_op.REFERENCE: want}))
        assert same and off == 0, (value.name, ubatch)
        assert exact is not None and exact < (1e-4 if "q8_0" in how.values() else 1e-6), (value.name, ubatch, exact)
    assert len(found) > 40


def shrinking_value(*args):
    return sys.modules[shrinking.__module__]._wanted(*args)


def test_one_byte_less_is_seen(run):
    """What the test above relies on: other operands, strides and parameters give other bits."""
    ours = record(run)
    value = next(v for v in ours.values if v.name == "Qcur-3")
    one = extract(run, value.name, value.occurrence, 0)
    one = replace(one, arrays={**one.arrays, one_op.REFERENCE: shrinking_value(Joined(value, value, 0, 0.0), one, ours, ours)})
    assert alone(one)[2]
    [(method, arguments)] = one.calls
    turned = {**one.arrays, "a": one.arrays["a"][::-1].copy()}
    for other in (replace(one, arrays=turned), replace(one, calls=((method, (*arguments[:3], arguments[3] - 2, *arguments[4:])),))):
        assert alone(other)[0] > 1e-3 and not alone(other, 1e-6)[2]


# --- a difference, from the run to the script's exit code


def rope_over_the_head_width(monkeypatch):
    rope = attention.rope
    monkeypatch.setattr(attention, "rope", lambda g, hp, x, pos: rope(g, replace(hp, n_rot=hp.n_embd_head_k), x, pos))


def expert_weights_not_renormalised(monkeypatch):
    monkeypatch.setattr(GraphBuilder, "div", lambda g, weights, total: g.scale(weights, 1.0))


def program(path, *args):
    done = subprocess.run([sys.executable, path, *args], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("bug, call, cure", [
    (rope_over_the_head_width, "g.rope_ext(a, b, None, 24, ", "g.rope_ext(a, b, None, 6, "),
    (expert_weights_not_renormalised, "g.scale(a, 1.0)", None),
], ids=["rope", "weights"])  # fmt: skip
@pytest.mark.parametrize("ref", ["float64", "plain"])
def test_the_script_of_a_bug_shows_it_and_what_would_cure_it(run, here, monkeypatch, tmp_path, bug, call, cure, ref):
    """The kernel does what it was told: it has float64's value of this op, and not the reference's."""
    wanted = replace(run, kind=FLOAT64) if ref == "float64" else run
    reference = record(wanted)
    bug(monkeypatch)
    ours = record(run)
    first = compare(ours, reference).first
    one = shrink(first, run, wanted, ours, reference)
    one.save(tmp_path / "op.safetensors")
    text = one.script(device="CPU", ggml=ggml.provider().name, tolerance=1e-6)
    (tmp_path / "op.py").write_text(text)
    assert text.startswith(f'"""{one.op} behind {first.value.name} #') and f"made by    {first.value.line}\n" in text
    assert f"y = {call}" in text
    status, lines, stderr = program(tmp_path / "op.py")
    assert (status, stderr) == (1, "") and lines[0].startswith(f"{one.op} [")
    assert float(lines[1].split()[-1]) > 1e-3
    here_off, there_off = (float(part.split()[0]) for part in lines[2].split("NMSE ")[1].split(", "))
    assert here_off < 1e-9 and there_off > 1e-3
    if cure:
        (tmp_path / "op.py").write_text(text.replace(call, cure))
        status, lines, _ = program(tmp_path / "op.py")
        assert status == 0 and float(lines[1].split()[-1]) < 1e-9


def test_equal_sides_have_equal_scripts_on_either_libggml(run, here, tmp_path):
    """Any node will do: in lean order of experts too, whose reference comes in another one."""
    plain, lean = replace(run, flash_attn="on"), replace(run, graph="lean", flash_attn="on")
    ours, reference = record(lean), record(plain)
    nodes = {node.value.name: node for node in compare(ours, reference).nodes}
    orders = [next(v.array for v in side.values if v.name == "ffn_moe_topk-0") for side in (ours, reference)]
    assert (orders[0] != orders[1]).any(), "the two graphs have the experts in the same order here, so the test shows nothing"
    for name in ("ffn_moe_down-0", "ffn_moe_topk-0", "new_state-1", "Kcur-3", "result_output"):
        one = shrink(nodes[name], lean, plain, ours, reference)
        one.save(tmp_path / "op.safetensors")
        (tmp_path / "op.py").write_text(one.script(device="CPU", ggml=ggml.provider().name, tolerance=1e-6))
        assert f"operands   as read by {reference.title}" in one.note
        for provider in ("ggml_python", "llama_cpp"):
            status, lines, stderr = program(tmp_path / "op.py", "--ggml", provider)
            assert (status, stderr) == (0, ""), (name, lines)
            assert f" of {provider}" in lines[0] and float(lines[1].split()[-1]) < 1e-6


def test_experts_in_another_order_would_be_another_value(run, here, monkeypatch):
    plain, lean = run, replace(run, graph="lean")
    ours, reference = record(lean), record(plain)
    [node] = [node for node in compare(ours, reference).nodes if node.value.name == "ffn_moe_down-0"]
    assert alone(shrink(node, lean, plain, ours, reference), 1e-6)[2]
    monkeypatch.setattr(sys.modules[shrinking.__module__], "_in_order", lambda rows, *_: rows)
    assert not alone(shrink(node, lean, plain, ours, reference), 1e-6)[2]


# --- what cannot be done


def test_what_has_no_op_is_refused(run):
    with pytest.raises(OptionError, match="inp_tokens is an input of the graph"):
        extract(run, "inp_tokens", 0, 0)
    with pytest.raises(OptionError, match="conv_states-0 is what cache_r_l0 held before this ubatch"):
        extract(replace(run, graph="lean"), "conv_states-0", 0, 1)
    with pytest.raises(OptionError, match="ubatch 7 of this run"):
        extract(run, "l_out-0", 0, 7)
    with pytest.raises(OptionError, match="on one device, this one is on 2: CPU,CPU"):
        extract(replace(run, device="CPU,CPU"), "l_out-0", 0, 0)


def test_errors_of_a_script_are_one_line(run, tmp_path):
    ours = record(run)
    value = next(v for v in ours.values if v.name == "l_out-0")
    one = extract(run, "l_out-0", 0, 0)
    one = replace(one, arrays={**one.arrays, one_op.REFERENCE: shrinking_value(Joined(value, value, 0, 0.0), one, ours, ours)})
    path = tmp_path / "op.py"
    path.write_text(one.script(device="CPU", ggml=ggml.provider().name, tolerance=1e-6))
    assert program(path)[0] == 1 and program(path)[2].startswith("error: ") and "No such file" in program(path)[2]
    one.save(path.with_suffix(".safetensors"))
    assert program(path)[0] == 0
    status, lines, stderr = program(path, "--device", "CUDA7")
    assert (status, lines) == (1, []) and stderr.startswith("error: no device CUDA7; ") and stderr.count("\n") == 1
    path.with_suffix(".safetensors").write_bytes(path.with_suffix(".safetensors").read_bytes()[:-9])
    with pytest.raises(StateError, match="cut short"):
        OneOp.load(path.with_suffix(".safetensors"))
    record(run).save(path.with_suffix(".safetensors"))
    with pytest.raises(OptionError, match="holds no op"):
        OneOp.load(path.with_suffix(".safetensors"))
