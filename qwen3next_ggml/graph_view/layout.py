"""Place boxes in ranks so that edges run downwards and cross little (level 7).

Knows boxes and edges only: ranks by longest path, order inside a rank by barycentre, x by least squares. Edges of one
source share their way down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

RANK_GAP, BOX_GAP, LANE_GAP = 26.0, 22.0, 10.0
SWEEPS = 12
LANE_WEIGHT = 3.0  # a lane that bends reads worse than a box off its centre


@dataclass(frozen=True)
class Placed:
    """Where everything is: per box its left upper corner, per edge (source, target) the points it runs through."""

    corners: tuple[tuple[float, float], ...]
    edges: tuple[tuple[int, int, tuple[tuple[float, float], ...]], ...]
    width: float
    height: float


@lru_cache(maxsize=64)
def place(sizes: tuple[tuple[float, float], ...], readers: tuple[tuple[int, int], ...]) -> Placed:
    """Place boxes of `sizes` (width, height); `readers` are pairs (source, target), every source before its target.

    The same boxes and edges, as in layers of one kind, are placed once.
    """
    rank = _ranks(len(sizes), readers)
    # cells: boxes first, then for each source one lane cell per rank that it passes on its way to its last reader
    lanes, links = _lanes(rank, readers, len(sizes))
    cell_rank = rank + [r for _, r in lanes]
    rows: list[list[int]] = [[] for _ in range(max(cell_rank, default=-1) + 1)]
    for cell in sorted(range(len(cell_rank)), key=lambda c: c if c < len(sizes) else lanes[c - len(sizes)][0] + 0.5):
        rows[cell_rank[cell]].append(cell)
    up: list[list[int]] = [[] for _ in cell_rank]
    down: list[list[int]] = [[] for _ in cell_rank]
    for a, b in links:
        down[a].append(b)
        up[b].append(a)
    rows = _ordered(rows, up, down)
    width = [w for w, _ in sizes] + [0.0] * len(lanes)
    x = _columns(rows, up, down, width)
    top, heights, y = [], [max((sizes[c][1] for c in row if c < len(sizes)), default=0.0) for row in rows], 0.0
    for height in heights:
        top.append(y)
        y += height + RANK_GAP
    left = min((x[c] - width[c] / 2 for c in range(len(x))), default=0.0)
    corners = tuple((round(x[c] - sizes[c][0] / 2 - left, 1), round(top[rank[c]], 1)) for c in range(len(sizes)))
    lane_at = {lane: len(sizes) + i for i, lane in enumerate(lanes)}
    edges = tuple((a, b, _route(a, b, rank, lane_at, x, left, top, heights, sizes)) for a, b in readers)
    right = max((x[c] + width[c] / 2 for c in range(len(x))), default=0.0)
    return Placed(corners, edges, round(right - left, 1), round(max(y - RANK_GAP, 0.0), 1))


def _ranks(n: int, readers: Sequence[tuple[int, int]]) -> list[int]:
    rank = [0] * n
    for a, b in readers:
        rank[b] = max(rank[b], rank[a] + 1)
    # what nothing here feeds moves down to its first reader
    fed = {b for _, b in readers}
    first = {}
    for a, b in readers:
        first[a] = min(first.get(a, rank[b]), rank[b])
    return [first[i] - 1 if i not in fed and i in first else r for i, r in enumerate(rank)]


def _lanes(rank: list[int], readers: Sequence[tuple[int, int]], n: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    last = {}
    for a, b in readers:
        last[a] = max(last.get(a, 0), rank[b])
    lanes = [(a, r) for a in sorted(last) for r in range(rank[a] + 1, last[a])]
    at = {lane: n + i for i, lane in enumerate(lanes)}

    def above(a: int, r: int) -> int:
        return at.get((a, r - 1), a)

    links = {(above(a, r), at[a, r]) for a, r in lanes} | {(above(a, rank[b]), b) for a, b in readers}
    return lanes, sorted(links)


def _ordered(rows: list[list[int]], up: list[list[int]], down: list[list[int]]) -> list[list[int]]:
    best, fewest = rows, _crossings(rows, down)
    for sweep in range(SWEEPS):
        rows = [row[:] for row in rows]
        near, turn = (up, rows[1:]) if sweep % 2 == 0 else (down, rows[-2::-1])
        at = {cell: i for row in rows for i, cell in enumerate(row)}
        for row in turn:
            row.sort(key=lambda c: sum(at[n] for n in near[c]) / len(near[c]) if near[c] else at[c])
            at.update((cell, i) for i, cell in enumerate(row))
        crossings = _crossings(rows, down)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _crossings(rows: list[list[int]], down: list[list[int]]) -> int:
    total = 0
    for upper, lower in zip(rows, rows[1:]):
        at = {cell: i for i, cell in enumerate(lower)}
        ends = [end for cell in upper for end in sorted(at[n] for n in down[cell])]
        total += sum(ends[i] > ends[j] for i in range(len(ends)) for j in range(i + 1, len(ends)))
    return total


def _columns(rows: list[list[int]], up: list[list[int]], down: list[list[int]], width: list[float]) -> list[float]:
    """Return the centre of every cell: as close to its neighbours' mean as the order and the gaps allow."""
    x = [0.0] * len(width)
    for row in rows:
        _spread(row, [0.0] * len(row), x, width)
    for sweep in range(SWEEPS):
        near = (up, down, None)[sweep % 3]
        for row in rows if near is not down else rows[::-1]:
            wanted = []
            for cell in row:
                around = near[cell] if near else up[cell] + down[cell]
                wanted.append(sum(x[n] for n in around) / len(around) if around else x[cell])
            _spread(row, wanted, x, width)
    return x


def _spread(row: list[int], wanted: list[float], x: list[float], width: list[float]) -> None:
    """Give the cells of a row, in order, the places nearest to those wanted; weighted least squares by pooling."""
    offsets, at = [], 0.0
    for i, cell in enumerate(row):
        if i:
            lane = width[cell] == 0.0 or width[row[i - 1]] == 0.0
            at += width[row[i - 1]] / 2 + width[cell] / 2 + (LANE_GAP if lane else BOX_GAP)
        offsets.append(at)
    pools: list[list[float]] = []  # [mean, weight, how many]
    for cell, want, offset in zip(row, wanted, offsets):
        pools.append([want - offset, LANE_WEIGHT if width[cell] == 0.0 else 1.0, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight, n = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
            last[1], last[2] = last[1] + weight, last[2] + n
    means = [mean for mean, _, n in pools for _ in range(int(n))]
    for cell, mean, offset in zip(row, means, offsets):
        x[cell] = mean + offset


def _route(a, b, rank, lane_at, x, left, top, heights, sizes) -> tuple[tuple[float, float], ...]:
    points = [(x[a] - left, top[rank[a]] + sizes[a][1])]
    for r in range(rank[a] + 1, rank[b]):
        column = x[lane_at[a, r]] - left
        points += [(column, top[r]), (column, top[r] + heights[r])]
    points.append((x[b] - left, top[rank[b]]))
    return tuple((round(px, 1), round(py, 1)) for px, py in points)
