"""Run every op case on a device and measure how far it is from float64 (level 11)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .. import ggml
from ..errors import QGraphError
from ..graph.own import Graph
from .compare import nmse
from .op_cases import Case, cases

OK, HALF, MISS, LACKING = "ok", "float16", "MISS", "not supported"


@dataclass(frozen=True)
class OpResult:
    """One case on one device: `verdict` is OK, MISS, or LACKING where the device says it cannot; `why` adds what was said.

    HALF is further off than `limit`, and no further than float16 gives, on a device that may compute in it.
    """

    op: str
    shape: str
    nmse: float
    limit: float
    verdict: str
    why: str = ""


def check_ops(device: str = "CPU", *, ggml_name: str | None = None, only: Iterable[Case] | None = None) -> Iterator[OpResult]:
    """Yield the result of every case on `device`. Raises BackendError when there is no such device."""
    ggml.provider(ggml_name)
    ggml.device(device)
    for case in cases() if only is None else only:
        yield check(case, device)


def check(case: Case, device: str) -> OpResult:
    """Run one case; a refusal, a non-finite value and a value further off than the limit are all misses."""
    with Graph(device=device) as g:
        try:
            node, pair = case.build(g)
            if not ggml.device(device).supports_op(node):
                return OpResult(case.op, case.shape, np.nan, case.limit, LACKING)
            got, want = pair(g.compute(node))
        except QGraphError as error:
            return OpResult(case.op, case.shape, np.inf, case.limit, MISS, str(error))
        off = nmse(got, want) if np.isfinite(got).all() else np.inf
    if case.limit < off <= case.half_limit and ggml.device(device).kind != "cpu":
        return OpResult(case.op, case.shape, off, case.limit, HALF, f"above {case.limit:.0e}, as float16 gives")
    return OpResult(case.op, case.shape, off, case.limit, OK if off <= case.limit else MISS)
