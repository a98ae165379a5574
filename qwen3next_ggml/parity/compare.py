"""Join two recordings on (name, occurrence) and find where they part (level 11)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import OptionError
from .recording import EACH, TOKENS, Recording, Value

# addresses in memories laid out differently, rows of one ubatch, and the order of experts that were not picked mean nothing
NOT_COMPARED = ("rs_s_copy", "rs_s_dst", "out_ids", "attn_inp_k_idxs", "attn_inp_v_idxs", "ffn_moe_argsort")
TOP_K = "ffn_moe_topk"
BY_EXPERT = frozenset(
    f"ffn_moe_{x}" for x in ("weights", "weights_norm", "weights_scaled", "gate_up", "gate", "up", "swiglu", "down", "weighted")
)


@dataclass(frozen=True)
class Joined:
    """One node both sides have: `nmse` relative to the reference, inf where `why` says what else is wrong.

    `ubatch` is the first one in which it is off by more than the tolerance.
    """

    value: Value
    reference: Value
    ubatch: int
    nmse: float
    why: str = ""

    @property
    def layer(self) -> int | None:
        found = re.search(r"-(\d+)$", self.value.name)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Comparison:
    """Two recordings side by side: `nodes` in the order of the graph, names only one side has, and those of other extent."""

    title: str
    reference: str
    tolerance: float
    nodes: tuple[Joined, ...]
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    unlike: tuple[str, ...]

    @property
    def misses(self) -> list[Joined]:
        """The nodes that are off by more than the tolerance, in the order they were computed in: ubatch by ubatch."""
        # a state spoilt in one ubatch shows in the next one at nodes that come earlier in the graph
        return sorted((node for node in self.nodes if not node.nmse <= self.tolerance), key=lambda node: node.ubatch)

    @property
    def first(self) -> Joined | None:
        return next(iter(self.misses), None)

    @property
    def worst(self) -> Joined:
        return max(self.nodes, key=lambda node: node.nmse)

    def by_layer(self) -> Iterator[tuple[int | None, int, Joined]]:
        """Yield (layer, nodes compared, the worst of them); None stands for what is in no layer."""
        for layer in dict.fromkeys(node.layer for node in self.nodes):
            nodes = [node for node in self.nodes if node.layer == layer]
            yield layer, len(nodes), max(nodes, key=lambda node: node.nmse)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Return the squared error relative to the squared size of `want`, as ggml's test-backend-ops does."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    with np.errstate(over="ignore"):
        return float(np.sum((got - want) ** 2) / max(np.sum(want**2), np.finfo(np.float64).tiny))


def compare(ours: Recording, theirs: Recording, *, tolerance: float = 1e-6) -> Comparison:
    """Compare `ours` with a reference: experts as sets, infinities by place, all else by NMSE.

    What is per expert is put in the order of the ids first. Nodes whose extent differs (chunks, windows of ubatches cut
    otherwise) cannot be compared and are listed. Raises OptionError for other tokens or nothing in common.
    """
    if ours.tokens != theirs.tokens:
        raise OptionError(f"the two sides ran other tokens: {len(ours.tokens)} here, {len(theirs.tokens)} in {theirs.title}")
    last = {value.name: value.occurrence for value in ours.values}
    by_place = {(value.name, value.occurrence): value for value in theirs.values}
    ids = [{v.name: v.array for v in side.values if v.name.startswith(TOP_K)} for side in (ours, theirs)]
    nodes, only_here, unlike, joined = [], [], [], set()
    for value in ours.values:
        if value.name.startswith(NOT_COMPARED):
            continue
        place = (value.name, value.occurrence)
        if place not in by_place and last[value.name] == value.occurrence:
            place = (value.name, None)
        if place not in by_place:
            only_here.append(f"{value.name}#{value.occurrence}")
            continue
        joined.add(place)
        both = _in_common(value, by_place[place], ours.ubatches, theirs.ubatches)
        pair = _same_extent(*both) if both else None
        if pair is None:
            unlike.append(value.name)
        else:
            value, other = both
            pair = _aligned(value.name, pair, ids)
            found = _difference(value.name, *pair)
            bad = found[0] > tolerance
            nodes.append(Joined(value, other, _first_bad(value, pair, ours.ubatches, tolerance) if bad else 0, *found))
    if not nodes:
        raise OptionError(f"nothing to compare: {theirs.title} has no node of the same name and extent")
    only_there = [f"{name}#{n or 0}" for name, n in by_place if (name, n) not in joined and not name.startswith(NOT_COMPARED)]
    return Comparison(ours.title, theirs.title, tolerance, tuple(nodes), *map(tuple, (only_here, only_there, unlike)))


def _in_common(
    ours: Value, theirs: Value, ubatches: Sequence[int], theirs_ubatches: Sequence[int]
) -> tuple[Value, Value] | None:  # fmt: skip
    """Return both values in the ubatches that have them on both sides; None where there are none, or none that can be told."""
    if not ours.present and not theirs.present:
        return ours, theirs
    sides = ((ours, ubatches), (theirs, theirs_ubatches))
    here, there = (_present(value, cut) for value, cut in sides)
    if tuple(ubatches) != tuple(theirs_ubatches):
        # of ubatches cut otherwise only the last is surely the same
        return (ours, theirs) if (here[-1], there[-1]) == (len(ubatches) - 1, len(theirs_ubatches) - 1) else None
    common = tuple(i for i in here if i in there)
    found = tuple(_only(value, cut, common) for value, cut in sides) if common else ()
    return found if all(found) and found else None


def _present(value: Value, ubatches: Sequence[int]) -> Sequence[int]:
    return value.present or range(len(ubatches))


def _only(value: Value, ubatches: Sequence[int], wanted: tuple[int, ...]) -> Value | None:
    parts = _parts(value, len(value.array), ubatches)
    if parts:
        return replace(value, array=np.concatenate([value.array[parts[i]] for i in wanted]), present=wanted)
    return value if _present(value, ubatches)[-1] == wanted[-1] else None


def _same_extent(ours: Value, theirs: Value) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both arrays, tokens first, or None; where one side has a value per token and the other the last, the last."""
    a, b = ours.array, theirs.array
    if a.size != b.size:
        a, b = (x[-1:] if v.how == EACH and TOKENS not in (ours.how, theirs.how) else x for x, v in ((a, ours), (b, theirs)))
    return (a, b) if a.size == b.size else None


def of_ubatch(value: Value, other: Value, ubatches: Sequence[int], ubatch: int) -> np.ndarray:
    """Return the part of `other` that stands beside `value` in one ubatch: tokens first, one state, or all there is."""
    ours, theirs = _same_extent(value, other)
    return theirs[_parts(value, len(ours), ubatches).get(ubatch, slice(None))]


def _parts(value: Value, n: int, ubatches: Sequence[int]) -> dict[int, slice]:
    """Return where each ubatch lies on the first axis, of length `n`; nothing where only one value was kept."""
    present = _present(value, ubatches)
    sizes = [ubatches[i] for i in present]
    ends = np.cumsum(sizes).tolist()
    if n == ends[-1]:
        return {i: slice(end - size, end) for i, size, end in zip(present, sizes, ends)}
    return {i: slice(at, at + 1) for at, i in enumerate(present)} if value.how == EACH and n == len(present) else {}


def _aligned(name: str, pair: tuple[np.ndarray, np.ndarray], ids: Sequence[dict]) -> list[np.ndarray]:
    """Return both arrays as rows, one per token or ubatch, with experts in the order of their ids."""
    base, _, layer = name.rpartition("-")
    rows = [x.reshape(len(pair[0]), -1) for x in pair]
    if base == TOP_K:
        return [np.sort(x, axis=1) for x in rows]
    if base not in BY_EXPERT:
        return rows
    return [_by_id(x, chosen.get(f"{TOP_K}-{layer}")) for x, chosen in zip(rows, ids)]


def _by_id(x: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    if ids is None or len(ids) != len(x) or x.size % ids.size:
        return x
    order = np.argsort(ids.reshape(len(ids), -1), axis=1)
    return np.take_along_axis(x.reshape(*order.shape, -1), order[..., None], axis=1).reshape(x.shape)


def _first_bad(value: Value, pair: Sequence[np.ndarray], ubatches: Sequence[int], tolerance: float) -> int:
    """Return the first ubatch in which a node is off, the last that has it where only one value was kept."""
    parts = _parts(value, len(pair[0]), ubatches)
    if not parts:
        return _present(value, ubatches)[-1]
    off = {i: _difference(value.name, *(x[part] for x in pair))[0] for i, part in parts.items()}
    return next((i for i, x in off.items() if x > tolerance), max(off, key=off.get))


def _difference(name: str, ours: np.ndarray, theirs: np.ndarray) -> tuple[float, str]:
    if name.startswith(TOP_K):
        n = len(ours) - int((ours == theirs).all(axis=1).sum())
        return (np.inf, f"other experts for {n} of {len(ours)} tokens") if n else (0.0, "")
    finite = np.isfinite(theirs)
    if np.isnan(ours).any() or not np.array_equal(np.where(finite, 0, theirs), np.where(np.isfinite(ours), 0, ours)):
        return np.inf, "NaN or infinity in other places"
    return nmse(ours[finite], theirs[finite]), ""
