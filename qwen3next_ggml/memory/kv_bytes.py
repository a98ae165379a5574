"""What cells hold as bytes, one row per cell however K and V are laid out (level 6).

`what` is "k" or "v"; cells are ascending; rows are uint8 [n, row] of the type they are stored in.
"""

import numpy as np

from ..graph.state import KvLayer


def row_size(layer: KvLayer, what: str) -> int:
    """Return the bytes of one cell."""
    x, spec = getattr(layer, what), layer.spec
    return x.type.row_size(spec.n_head_kv * (spec.n_embd_head_k if what == "k" else spec.n_embd_head_v))


def read_rows(layer: KvLayer, what: str, cells: np.ndarray) -> np.ndarray:
    """Return what `cells` hold."""
    x = getattr(layer, what)
    if what == "v" and layer.v_transposed:
        return np.ascontiguousarray(_values(layer)[:, cells].T).view(np.uint8)
    heads, size = _heads(layer, what)
    parts = [_joined([x.raw((head + run[0]) * size, len(run) * size).reshape(-1, size) for run in _runs(cells)], 0) for head in heads]
    return _joined(parts, 1)


def write_rows(layer: KvLayer, what: str, cells: np.ndarray, rows: np.ndarray) -> None:
    """Let `cells` hold `rows`."""
    x = getattr(layer, what)
    if what == "v" and layer.v_transposed:
        values = _values(layer)
        for run, own in zip(_runs(cells), _runs(cells, rows), strict=True):
            # a slice takes a third of the time that the indices of its cells do
            values[:, run[0] : run[-1] + 1] = own.view(values.dtype).T
        x.set(values.reshape(-1).view(np.uint8))
        return
    heads, size = _heads(layer, what)
    for head, part in zip(heads, np.split(rows, len(heads), axis=1), strict=True):
        for run, own in zip(_runs(cells), _runs(cells, part), strict=True):
            x.set(np.ascontiguousarray(own), (head + run[0]) * size)


def _values(layer: KvLayer) -> np.ndarray:
    """Return a copy of a transposed V, [n_embd_v, n_cells]."""
    return layer.v.raw().view(f"u{layer.v.type.type_size}").reshape(-1, layer.n_cells)


def _heads(layer: KvLayer, what: str) -> tuple[list[int], int]:
    """Return the number of the first cell of each part in which cells lie one behind the other, and a cell's bytes there."""
    n = layer.spec.n_head_kv if what == "k" and layer.k_by_head else 1
    return [i * layer.n_cells for i in range(n)], row_size(layer, what) // n


def _joined(parts: list[np.ndarray], axis: int) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def _runs(cells: np.ndarray, rows: np.ndarray | None = None) -> list[np.ndarray]:
    """Cut cells, or the rows that go with them, where a cell is not the neighbour of the one before."""
    return np.split(cells if rows is None else rows, np.flatnonzero(np.diff(cells) != 1) + 1)
