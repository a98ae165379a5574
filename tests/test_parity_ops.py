"""The op checks: every op of our graphs against float64, over the shapes that break kernels (C21, C22, C24)."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError, GraphError
from qwen3next_ggml.graph.own import Graph
from qwen3next_ggml.parity import ops as op_checks
from qwen3next_ggml.parity.op_cases import cases
from qwen3next_ggml.parity.ops import LACKING, MISS, OK, check, check_ops

CASES = list(cases())


@pytest.mark.parametrize("op", dict.fromkeys(case.op for case in CASES))
def test_the_cpu_is_right(op):
    results = list(check_ops("CPU", only=[case for case in CASES if case.op == op]))
    assert [r for r in results if r.verdict != OK] == []


def test_the_grids_are_those_of_the_field_cases():
    shapes = {op: [case.shape for case in CASES if case.op == op] for op in ("gated_delta_net", "solve_tri", "mul_mat_id")}
    assert {op: len(found) for op, found in shapes.items()} == {"gated_delta_net": 144, "solve_tri": 36, "mul_mat_id": 69}
    assert all(len(set(found)) == len(found) for found in shapes.values())
    assert {"n 64, k 64, batch 4x2", "n 128, k 33, batch 4x2"} <= set(shapes["solve_tri"])
    assert "q8_0, 512 experts, top 10, 8192 tokens" in shapes["mul_mat_id"]


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


def test_a_zero_on_the_diagonal_shows():
    with Graph(n_threads=1) as g:
        assert not np.isfinite(g.compute(g.solve_tri(g.tensor(np.zeros((4, 4))), g.tensor(np.eye(4)), True, True, False))).all()


def test_no_such_device():
    with pytest.raises(BackendError, match="no device CUDA7"):
        next(check_ops("CUDA7"))
