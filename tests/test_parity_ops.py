"""The op checks: every op of our graphs against float64, over the shapes that break kernels (C21, C22, C24)."""

from itertools import product

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError, GraphError
from qwen3next_ggml.graph.own import Graph
from qwen3next_ggml.graph_view.records import VIEW
from qwen3next_ggml.parity import ops as op_checks
from qwen3next_ggml.parity.op_case import Case
from qwen3next_ggml.parity.op_cases import cases
from qwen3next_ggml.parity.ops import HALF, LACKING, MISS, OK, check, check_ops

CASES = list(cases())


@pytest.mark.parametrize("op", dict.fromkeys(case.op for case in CASES))
def test_the_cpu_is_right(op):
    results = list(check_ops("CPU", only=[case for case in CASES if case.op == op]))
    assert [r for r in results if r.verdict != OK] == []


def test_the_grids_are_those_of_the_field_cases():
    shapes = {op: [case.shape for case in CASES if case.op == op] for op in ("gated_delta_net", "solve_tri", "mul_mat_id")}
    counted = {op: len(found) for op, found in shapes.items()}
    assert counted == {"gated_delta_net": 144 + 144 + 120, "solve_tri": 36 + 2, "mul_mat_id": 75 + 2}
    assert all(len(set(found)) == len(found) for found in shapes.values())
    assert {"n 64, k 64, batch 4x2", "n 128, k 33, batch 4x2"} <= set(shapes["solve_tri"])
    assert {f"{kind}, 512 experts, top 10, 8192 tokens" for kind in ("f16", "q8_0", "q4_k", "q6_k")} <= set(shapes["mul_mat_id"])
    assert "S 128, T 65, 2 seq, 2 to 1, channel gate, K 4, permuted" in shapes["gated_delta_net"]


def emitted(path, **options):
    """The kernels of a session's graphs: one token, some, and more than a chunk."""
    found = set()
    with q.load(path, n_threads=1) as model, model.session(n_ctx=256, **options) as s:
        for n in (1,) if s.options.delta_net == "autoregressive" else (1, 5, 70):
            found |= {node.op for node in s.graph(n).nodes if node.kind != VIEW}
    return found


def test_there_is_a_case_for_every_op_of_our_graphs(toys):
    forms = product(("fused", "chunked", "autoregressive"), ("plain", "lean"), (False, True), (0, 3))
    ours = set.union(*(emitted(toys.mtp, delta_net=d, graph=g, flash_attn=f, n_rollback=n, mtp=n > 0) for d, g, f, n in forms))
    assert len(ours) > 30 and ours - {case.op.upper().removesuffix("_SPLIT") for case in CASES} == set()


@pytest.mark.parametrize("op", dict.fromkeys(case.op for case in CASES))
def test_a_value_that_is_off_is_a_miss(monkeypatch, op):
    """By five parts in a hundred, or by one in an index: no case compares a value with itself."""
    compute = Graph.compute

    def off(self, *outputs):
        value = compute(self, *outputs)
        return value + 1 if value.dtype.kind in "iu" else value + 0.05 * np.abs(value).max()

    *_, case = (case for case in CASES if case.op == op)
    assert check(case, "CPU").verdict == OK
    monkeypatch.setattr(Graph, "compute", off)
    assert check(case, "CPU").verdict == MISS


def one(op, shape=""):
    return next(case for case in CASES if case.op == op and shape in case.shape)


FAULTS = {
    "gated_delta_net": lambda call: lambda self, q, k, v, g, beta, state, K: call(self, q, k, v, self.scale(g, 1.01), beta, state, K),
    "solve_tri": lambda call: lambda self, a, b, *how: call(self, a, self.scale(b, 1.001), *how),
    "mul_mat_id": lambda call: lambda self, w, x, ids: call(self, w, self.scale(x, 1.05), ids),
    "ssm_conv": lambda call: lambda self, x, kernel: call(self, x, self.scale(kernel, 1.001)),
    "flash_attn_ext": lambda call: lambda self, q, k, v, mask, *scales: call(self, q, k, v, None, *scales),
    "rope_ext": lambda call: lambda self, a, pos, c, n_rot, *more: call(self, a, pos, c, n_rot // 2, *more),
    "cumsum": lambda call: lambda self, a: a,
    "tri": lambda call: lambda self, a, kind: call(self, a, 2 if kind == 3 else 3),
    "argsort": lambda call: lambda self, a, order: call(self, a, 1 - order),
    "top_k": lambda call: lambda self, a, k: call(self, self.neg(a), k),
    "set_rows": lambda call: lambda self, a, b, ids: call(self, a, self.scale(b, -1.0), ids),
}


@pytest.mark.parametrize("method", FAULTS)
def test_a_kernel_that_is_off_is_a_miss(monkeypatch, method):
    case = one(method.removesuffix("_ext") if method == "rope_ext" else method, {"tri": "n 16", "cumsum": "n 16"}.get(method, ""))
    assert check(case, "CPU").verdict == OK
    monkeypatch.setattr(Graph, method, FAULTS[method](getattr(ggml.Ops, method)))
    found = check(case, "CPU")
    assert found.verdict == MISS and found.nmse > found.limit


@pytest.mark.parametrize("shape, limits", [("f16, 512 experts, top 10, 9 ", (1e-6, 2e-5)), ("f32, 1 experts", (1e-7, 1e-6))])
@pytest.mark.parametrize("kind, verdicts", [("cpu", (MISS, MISS)), ("gpu", (HALF, MISS))])
def test_what_float16_gives_is_told_apart(monkeypatch, kind, verdicts, shape, limits):
    """A GPU may multiply and add up in float16: not a miss, and not taken for right either."""
    case, compute, found = one("mul_mat_id", shape), Graph.compute, []
    assert (case.limit, case.half_limit) == limits
    monkeypatch.setattr(ggml.Device, "kind", property(lambda self: kind, lambda self, value: None))
    assert check(case, "CPU").verdict == OK
    for off in (case.half_limit / 2, case.half_limit * 2):
        monkeypatch.setattr(Graph, "compute", lambda self, *outputs, off=off: compute(self, *outputs) * (1 + off**0.5))
        found.append(check(case, "CPU"))
    assert tuple(result.verdict for result in found) == verdicts
    assert (found[0].why == f"above {limits[0]:.0e}, as float16 gives") is (kind == "gpu")
    assert check(one("get_rows", "of f16"), "CPU").verdict == MISS, "what only copies has no such excuse"


def test_what_a_device_lacks_is_said(monkeypatch):
    monkeypatch.setattr(ggml.Device, "supports_op", lambda self, node: False)
    assert check(one("ssm_conv"), "CPU").verdict == LACKING


def test_a_computation_that_fails_is_a_miss(monkeypatch):
    def fail(self, *outputs):
        raise BackendError("CPU: the computation failed")

    monkeypatch.setattr(Graph, "compute", fail)
    found = check(one("ssm_conv"), "CPU")
    assert (found.verdict, found.why) == (MISS, "CPU: the computation failed")


def test_a_node_that_cannot_be_built_is_a_miss(monkeypatch):
    def refuse(self, *_):
        raise GraphError("ssm_conv: not in this libggml")

    monkeypatch.setattr(Graph, "ssm_conv", refuse)
    found = check(one("ssm_conv"), "CPU")
    assert (found.verdict, found.why) == (MISS, "ssm_conv: not in this libggml")


def test_values_that_are_not_finite_are_a_miss(monkeypatch):
    monkeypatch.setattr(Graph, "compute", lambda self, *outputs: np.full(outputs[0].ne[::-1], np.nan))
    assert check(one("ssm_conv"), "CPU") == op_checks.OpResult("ssm_conv", one("ssm_conv").shape, np.inf, 1e-7, MISS)


@pytest.mark.parametrize("how", [(False, True, False), (True, False, False), (True, True, True)], ids=["right", "upper", "unit"])
def test_variants_of_solve_tri_that_do_not_exist_are_refused(how):
    with Graph() as g, pytest.raises(GraphError, match="solve_tri"):
        g.solve_tri(g.tensor(np.eye(4)), g.tensor(np.eye(4)), *how)


def test_a_right_side_with_gaps_is_refused_and_copied():
    """ggml takes no other layout; the message says so, and after `cont` it is numpy's answer."""
    lower, right = np.tril(np.ones((5, 5))) + np.eye(5), np.random.default_rng(1).normal(size=(3, 5))
    with Graph(n_threads=1) as g:
        a, b = g.tensor(lower), g.transpose(g.tensor(right))
        with pytest.raises(GraphError, match=r"solve_tri\(a f32 \[5, 5\], b .*contiguous\(b\)"):
            g.solve_tri(a, b, True, True, False)
        got = g.compute(g.solve_tri(a, g.cont(b), True, True, False))
    assert np.allclose(got, np.linalg.solve(lower, right.T), atol=1e-6)


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_zero_on_the_diagonal_shows(at):
    """The value is not finite from that row on, and a check of it is a miss that says so."""
    lower, right = np.tril(np.ones((4, 4))), np.arange(1.0, 9.0).reshape(4, 2)
    lower[at, at] = 0
    with Graph(n_threads=1) as g:
        got = g.compute(g.solve_tri(g.tensor(lower), g.tensor(right), True, True, False))
    assert np.isfinite(got[:at]).all() and not np.isfinite(got[at:]).any()
    case = Case("solve_tri", "zero", lambda g: (g.solve_tri(g.tensor(lower), g.tensor(right), True, True, False), lambda x: (x, x)))
    assert (check(case, "CPU").verdict, check(case, "CPU").nmse) == (MISS, np.inf)


# ids that mean nothing (C24)


@pytest.mark.parametrize("row, says", [
    ([3, -1, 5], "expert -1 is outside 0 … 15"), ([3, 16, 5], "expert 16 is outside 0 … 15"),
    ([7, 2, 7], "token 1 has expert 7 more than once"),
], ids=["negative", "n_expert", "repeated"])  # fmt: skip
def test_ids_that_mean_nothing_are_refused(row, says):
    """Before the op is built, where they are given; ids that a graph computes come from a top-k and cannot be these."""
    with Graph(n_threads=1) as g:
        w, x = g.tensor(np.ones((16, 4, 32))), g.tensor(np.ones((2, 1, 32)))
        with pytest.raises(GraphError, match=says):
            g.mul_mat_id(w, x, g.tensor(np.array([[0, 1, 2], row]), dtype="i32"))
        got = g.compute(g.mul_mat_id(w, x, g.tensor(np.array([[0, 1, 2], [15, 0, 2]]), dtype="i32")))
    assert np.array_equal(got, np.full((2, 3, 4), 32.0))


def test_no_such_device():
    with pytest.raises(BackendError, match="no device CUDA7"):
        next(check_ops("CUDA7"))
