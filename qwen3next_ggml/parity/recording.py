"""The named values of one run, in memory and in a file (level 11). Knows neither who ran nor what is compared."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..array_file import read_arrays, write_arrays
from ..errors import OptionError
from ..trace import FORMAT as TRACE

KIND = "qgraph recording 1"
# how the values of several ubatches make one: joined along the tokens, one per ubatch (of states; of everything where
# every ubatch has one token), or the last alone where their shapes differ
TOKENS, EACH, LAST = "tokens", "each", "last"


@dataclass(frozen=True)
class Value:
    """One named node: `ne` in ggml order as it was in the first ubatch, `array` float32 or int32, with the tokens or
    the ubatches first as `how` says.

    `occurrence` counts equal names within one graph, None where only the last was kept. `kernel` is the op that
    computed it, another one than `op` for a view, `inputs` are (name, shape) of what that reads, `line` is the Python line that
    made the node, `quantised` name and type of what a product multiplies with where that is quantised; all are empty where nobody
    noted them. `present` are the ubatches that have it where some have not.
    `axis` is where the tokens were, of four axes in numpy order.
    """

    name: str
    occurrence: int | None
    op: str
    ne: tuple[int, ...]
    how: str
    array: np.ndarray
    kernel: str = ""
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    line: str = ""
    quantised: tuple[str, ...] = ()
    present: tuple[int, ...] = ()
    axis: int | None = None


@dataclass(frozen=True)
class Recording:
    """What one side computed for `tokens`, cut into `ubatches`: its values in the order of the graph; `title` says who it was.

    `options` are the GraphOptions a session came to.
    """

    title: str
    tokens: tuple[int, ...]
    ubatches: tuple[int, ...]
    values: tuple[Value, ...]
    options: Mapping[str, bool | str] = field(default_factory=dict)

    def save(self, path: str | os.PathLike) -> int:
        """Write a safetensors file, array names like "l_out-3#0" → its size. Raises StateError when the system refuses."""
        heads = [{key: x for key, x in vars(value).items() if key != "array"} for value in self.values]
        about = {"kind": KIND, "title": self.title}
        about |= {"tokens": json.dumps(self.tokens), "ubatches": json.dumps(self.ubatches), "values": json.dumps(heads)}
        about["options"] = json.dumps(self.options)
        return write_arrays(path, about, {_key(value.name, value.occurrence): value.array for value in self.values})

    @classmethod
    def load(cls, path: str | os.PathLike) -> Recording:
        """Read a file that `save` or `write_trace` wrote. Raises StateError for a damaged one, OptionError for any other."""
        about, arrays = read_arrays(path, what="recording or trace")
        if about.get("format") == TRACE:
            return _traced(path, json.loads(about["trace"]), dict(arrays))
        if about.get("kind") != KIND:
            raise OptionError(f"{path} is not a recording: its kind is {about.get('kind')!r}, expected {KIND!r} or a trace")
        values = [_value(head, arrays[_key(head["name"], head["occurrence"])]) for head in json.loads(about["values"])]
        tokens, ubatches = (tuple(json.loads(about[key])) for key in ("tokens", "ubatches"))
        return cls(about["title"], tokens, ubatches, tuple(values), json.loads(about["options"]))


def _traced(path: str | os.PathLike, about: Mapping, arrays: dict[str, np.ndarray]) -> Recording:
    if "token_axes" not in about:
        raise OptionError(f"{path} is a trace that does not say where its tokens are; write it again with `qgraph trace`")
    tokens = tuple(arrays.pop("tokens").tolist())
    values = []
    for full, array in arrays.items():
        name, _, occurrence = full.partition("#")
        axis, ne = about["token_axes"][full], trimmed(array.shape[::-1])
        if axis is not None:
            array = np.moveaxis(array.reshape((1,) * (4 - array.ndim) + array.shape), axis, 0)
        how = LAST if axis is None else TOKENS
        values.append(Value(name, int(occurrence) if occurrence else None, "", ne, how, _stored(array)))
    n_ubatch = about["options"]["n_ubatch"]
    ubatches = tuple(min(n_ubatch, len(tokens) - start) for start in range(0, len(tokens), n_ubatch))
    return Recording(f"{os.path.basename(path)}, a trace of {about['model']}", tokens, ubatches, tuple(values))


def _key(name: str, occurrence: int | None) -> str:
    return name if occurrence is None else f"{name}#{occurrence}"


def _value(head: Mapping, array: np.ndarray) -> Value:
    inputs = tuple((name, tuple(shape)) for name, shape in head["inputs"])
    rest = {name: tuple(head.get(name, ())) for name in ("ne", "present", "quantised")}
    return Value(**{**head, **rest, "inputs": inputs}, array=array)


def is_named(name: str) -> bool:
    """Say whether an author gave this name: ggml numbers the rest, or derives it from its source, as in "x (view)"."""
    return bool(name) and not name.startswith(("node_", "leaf_")) and " (" not in name


def merge(
    ubatches: Sequence[Mapping[tuple[str, int], tuple[str, tuple[int, ...], np.ndarray]]], n_tokens: Sequence[int],
    notes: Mapping[tuple[str, int], tuple[str, tuple, str, tuple]] | None = None,
) -> tuple[Value, ...]:  # fmt: skip
    """Make one value of each node's values in `ubatches` of `n_tokens`, (name, occurrence) → (op, ne, array).

    The token axis is the one as long as every ubatch, of whatever length. `notes` holds (kernel, inputs, line, quantised) of nodes.
    """
    order = dict.fromkeys(at for ubatch in ubatches for at in ubatch if is_named(at[0]))
    merged = []
    for at in order:
        present = tuple(i for i, ubatch in enumerate(ubatches) if at in ubatch)
        arrays = [array.reshape(ne[::-1]) for _, ne, array in (ubatches[i][at] for i in present)]
        how, axis, array = _joined(arrays, [n_tokens[i] for i in present])
        op, ne, _ = ubatches[present[0]][at]
        if array.size:
            some = present if len(present) < len(ubatches) else ()
            merged.append(Value(*at, op, trimmed(ne), how, _stored(array), *(notes or {}).get(at, ()), present=some, axis=axis))
    return tuple(merged)


def trimmed(ne: Iterable[int]) -> tuple[int, ...]:
    """Drop the ones that end a shape in ggml order."""
    ne = list(ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return tuple(ne)


def _joined(arrays: Sequence[np.ndarray], n_tokens: Sequence[int]) -> tuple[str, int | None, np.ndarray]:
    axes = [i for i in range(arrays[0].ndim) if all(array.shape[i] == n for array, n in zip(arrays, n_tokens))]
    rest = {tuple(np.delete(array.shape, axes[0])) for array in arrays} if len(axes) == 1 else ()
    if len(rest) == 1 and max(n_tokens) > 1:
        return TOKENS, axes[0], np.concatenate([np.moveaxis(array, axes[0], 0) for array in arrays])
    if len({array.shape for array in arrays}) == 1:
        return EACH, None, np.stack(arrays)
    return LAST, None, arrays[-1]


def _stored(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.int32 if array.dtype.kind in "iu" else np.float32)
