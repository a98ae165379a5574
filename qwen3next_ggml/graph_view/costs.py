"""What a node costs: bytes, FLOPs and barriers (level 7).

Bytes are those of the elements an op has to touch, each once; what caches save or kernels read again is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..ggml import GgmlType

VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
MOVES = frozenset("CPY CONT DUP GET_ROWS SET_ROWS SET CONCAT REPEAT PAD ROLL ARGSORT TOP_K ARGMAX FILL ARANGE TRI DIAG".split())
# arithmetic per element of the result where it is not one; an exponential counts as one
PER_ELEMENT = {
    "RMS_NORM": 3, "NORM": 5, "L2_NORM": 3, "SOFT_MAX": 4, "SILU": 3, "SIGMOID": 3, "SOFTPLUS": 3, "SWIGLU": 4, "GELU": 8, "ROPE": 3, "CLAMP": 2,
}  # fmt: skip
REDUCTIONS = frozenset({"SUM", "SUM_ROWS", "MEAN", "CUMSUM"})
# ops in which the CPU's threads meet once before their end; the same places in ggml 0.15.3 and 0.25.3
INNER_BARRIER = frozenset({"MUL_MAT", "MUL_MAT_ID", "GATED_DELTA_NET", "OUT_PROD", "FLASH_ATTN_EXT"})


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor as far as its cost depends on it."""

    op: str
    type: GgmlType
    ne: tuple[int, int, int, int]
    is_view: bool = False

    @property
    def n(self) -> int:
        return prod(self.ne)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, without the gaps of a view."""
        return self.n * self.type.type_size // self.type.block_size


def traffic(x: Shaped, sources: Sequence[Shaped]) -> tuple[int, int]:
    """Return bytes read and written.

    Gathers and scatters touch the rows they name, `MUL_MAT_ID` at most one matrix per picked expert.
    """
    if x.op in VIEW_OPS or x.n == 0:
        return 0, 0
    rest = sum(s.nbytes for s in sources[1:])
    if x.op == "GET_ROWS":
        return x.n * sources[0].type.type_size // sources[0].type.block_size + rest, x.nbytes
    if x.op == "SET_ROWS":
        rows, index = sources[0], sources[1]
        return rows.nbytes + index.nbytes, rows.n * x.type.type_size // x.type.block_size
    if x.op == "CPY":
        return sources[0].nbytes, x.nbytes
    if x.op == "SET" and x.is_view:
        return sources[1].nbytes, sources[1].nbytes
    if x.op == "MUL_MAT_ID":
        experts, _, ids = sources
        n_touched = min(experts.ne[2], ids.n)
        return experts.nbytes // experts.ne[2] * n_touched + rest, x.nbytes
    return sum(s.nbytes for s in sources), x.nbytes


def flops(x: Shaped, sources: Sequence[Shaped]) -> int:
    """Return additions and multiplications: exact for products, attention and the delta rule, else a count per element."""
    if x.op in VIEW_OPS or x.op in MOVES or x.n == 0:
        return 0
    a = sources[0] if sources else x
    if x.op in ("MUL_MAT", "MUL_MAT_ID"):
        return 2 * a.ne[0] * x.n
    if x.op == "OUT_PROD":
        return 2 * a.ne[1] * x.n
    if x.op == "FLASH_ATTN_EXT":
        q, k, v = sources[:3]
        return 2 * q.ne[1] * q.ne[2] * q.ne[3] * k.ne[1] * (k.ne[0] + v.ne[0])
    if x.op == "GATED_DELTA_NET":
        q, v = sources[0], sources[2]
        # per element of the state: decay, two for S'k, two for the update, two for S'q
        return 7 * q.ne[0] * v.n
    if x.op == "SSM_CONV":
        return 2 * sources[1].ne[0] * x.n
    if x.op == "CONV_2D_DW":
        return 2 * a.ne[0] * a.ne[1] * x.n
    if x.op == "SOLVE_TRI":
        return a.ne[0] * x.n
    if x.op in REDUCTIONS:
        return a.n
    return PER_ELEMENT.get(x.op, 1) * x.n


def barriers(nodes: Sequence[Shaped], sources: Sequence[Sequence[int | None]]) -> list[int]:
    """Return how often the CPU's threads wait for each other in each node: once after it, in some ops once inside.

    `sources` are places in `nodes`, None for leaves. An `RMS_NORM` and the `MUL` right after it are one kernel where nothing
    else reads the norm; the pair's barrier is the second one's. A node without elements still costs its barrier.
    """
    readers: dict[int, int] = {}
    for mine in sources:
        for i in mine:
            if i is not None:
                readers[i] = readers.get(i, 0) + 1
    counts = []
    for i, x in enumerate(nodes):
        follower = nodes[i + 1] if i + 1 < len(nodes) else None
        fused = x.op == "RMS_NORM" and follower and follower.op == "MUL" and i in sources[i + 1] and readers[i] == 1
        counts.append(0 if x.op in VIEW_OPS or fused else 1 + (x.op in INNER_BARRIER and x.n > 0))
    return counts
