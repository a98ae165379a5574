"""One op out of a graph, with what it read, as a script that runs it again (level 11).

The script says which op on which operands; their bytes and the value another run had in its place lie in a file beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path

import numpy as np

from .. import ggml
from ..array_file import DTYPES, read_arrays, write_arrays
from ..errors import GraphError, OptionError, QGraphError
from ..ggml import types
from ..graph.own import Graph
from .compare import nmse
from .float64 import Float64, NotKnown
from .recording import trimmed

KIND = "qgraph op 1"
REFERENCE = "reference"
SUFFIX = ".safetensors"
# in any order
UNORDERED = "TOP_K"
_NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}


@dataclass(frozen=True)
class Laid:
    """How a tensor lies in memory: ggml's type, extents, strides in bytes, and `offset` bytes into what it is a view of.

    `of` is another operand whose memory it shares, empty where its own memory is kept.
    """

    type: str
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    offset: int = 0
    of: str = ""

    @property
    def contiguous(self) -> bool:
        return not self.offset and self.nb == _strides(self.type, self.ne)


@dataclass(frozen=True)
class OneOp:
    """`calls` of `Graph` methods, (method, arguments), the first of which makes the node and the others set something in it.

    A str among the arguments is Python text: the name of an operand, or "y" for the node. `result` is where the value named
    `name` lies in the node, `whole` whether it is all of it. `arrays` holds the operands' memory, and the value another
    run had as `REFERENCE`, in numpy order. `note` is the first text of the script.
    """

    name: str
    op: str
    calls: tuple[tuple[str, tuple], ...]
    operands: Mapping[str, Laid]
    result: Laid
    whole: bool
    arrays: Mapping[str, np.ndarray]
    note: str = ""

    def save(self, path: str | os.PathLike) -> int:
        """Write all of it to a safetensors file → its size. Raises StateError when the system refuses."""
        about = asdict(replace(self, arrays={}))
        return write_arrays(path, {"kind": KIND, "op": json.dumps(about)}, self.arrays)

    @classmethod
    def load(cls, path: str | os.PathLike) -> OneOp:
        """Read a file that `save` wrote. Raises StateError for a damaged one, OptionError for any other."""
        about, arrays = read_arrays(path, what="file of an op")
        if about.get("kind") != KIND:
            raise OptionError(f"{path} holds no op: its kind is {about.get('kind')!r}, expected {KIND!r}")
        said = json.loads(about["op"])
        said["calls"] = tuple((method, tuple(arguments)) for method, arguments in said["calls"])
        said["operands"] = {name: _laid(x) for name, x in said["operands"].items()}
        return cls(**said | {"result": _laid(said["result"]), "arrays": arrays})

    def script(self, *, device: str, ggml: str, tolerance: float) -> str:
        """Return the Python text that runs the op on `device` of `ggml` and compares."""
        body = [
            f"{name} = g.part({laid.of}, {_spelt(laid)})" if laid.of else f"{name} = g.operand({name!r}, {_spelt(laid)})"
            for name, laid in self.operands.items()
        ]
        for i, (method, arguments) in enumerate(self.calls):
            call = f"g.{method}({', '.join(map(_text, arguments))})"
            body.append(call if i else f"y = {call}")
        y = "y" if self.whole else f"g.part(y, {_spelt(self.result)})"
        settings = f"device={device!r}, ggml={ggml!r}, tolerance={tolerance!r}"
        lines = [f'"""{self.note}"""', "", "from qwen3next_ggml.parity.one_op import main", "", "", "def build(g):"]
        return "\n".join([*lines, *(f"    {line}" for line in [*body, f"return {y}"]), "", "", f"main(build, __file__, {settings})", ""])


def _text(argument: object) -> str:
    if isinstance(argument, float) and not isfinite(argument):
        return f"float({str(argument)!r})"
    return argument if isinstance(argument, str) else repr(argument)


def _laid(x: Mapping) -> Laid:
    return Laid(x["type"], tuple(x["ne"]), tuple(x["nb"]), x["offset"], x["of"])


def _spelt(laid: Laid) -> str:
    parts = [repr(laid.type), f"ne={laid.ne}"]
    return ", ".join(parts if laid.contiguous else [*parts, f"nb={laid.nb}"] + [f"offset={laid.offset}"] * bool(laid.offset))


def _strides(type: str, ne: Sequence[int]) -> tuple[int, ...]:
    kind = types.GgmlType.of(type)
    row = kind.row_size(ne[0])
    return kind.type_size, row, row * ne[1], row * ne[1] * ne[2]


class OnDevice(Graph):
    """Builds the op of a script on a device."""

    def __init__(self, arrays: Mapping[str, np.ndarray], device: str):
        super().__init__(device=device)
        self._given = arrays

    def operand(self, name: str, type: str, *, ne: tuple[int, ...], nb: tuple[int, ...] | None = None) -> ggml.Tensor:
        """Return the operand `name`, its memory filled and its strides as they were."""
        kind, raw = types.GgmlType.of(type), self._given[name]
        laid = Laid(type, ne, nb or _strides(type, ne))
        flat = ne if laid.contiguous else (raw.nbytes // kind.type_size * kind.block_size,)
        base = self.set_input(self.context.new_tensor(kind, *flat, name=name))
        self._arrays[base] = raw.reshape(ne[::-1]) if laid.contiguous and type in _NUMPY else raw
        return base if laid.contiguous else self.part(base, type, ne=ne, nb=laid.nb)

    def type(self, name: str) -> types.GgmlType:
        return types.GgmlType.of(name)

    def part(self, y: ggml.Tensor, type: str, *, ne: tuple[int, ...], nb: tuple[int, ...] | None = None, offset: int = 0) -> ggml.Tensor:
        """View `y` with any strides, the smallest of which is one element: as a view, then with its dimensions in order."""
        nb = nb or _strides(type, ne)
        order = sorted(range(4), key=lambda i: (nb[i], i))
        view = self.view_4d(y, *(ne[i] for i in order), *(nb[i] for i in order[1:]), offset)
        return view if order == [0, 1, 2, 3] else self.permute(view, *order)


class InFloat64(Float64):
    """Evaluates the op of a script in float64."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._given = arrays

    def operand(self, name: str, type: str, *, ne: tuple[int, ...], nb: tuple[int, ...] | None = None) -> np.ndarray:
        kind, raw, nb = types.GgmlType.of(type), self._given[name], nb or _strides(type, ne)
        if type in _NUMPY:
            return np.ndarray(ne[::-1], _NUMPY[type], raw, strides=nb[::-1]).astype(np.float64)
        rows = np.ndarray((*ne[:0:-1], kind.row_size(ne[0])), np.uint8, raw, strides=(*nb[:0:-1], 1))
        return types.dequantize(kind, rows, ne[0]).astype(np.float64)

    def type(self, name: str) -> str:
        return name

    def part(self, y: np.ndarray, type: str, *, ne: tuple[int, ...], nb: tuple[int, ...] | None = None, offset: int = 0) -> np.ndarray:
        if type not in _NUMPY:
            raise NotKnown(f"a view of {type}")
        size, flat = np.dtype(_NUMPY[type]).itemsize, np.ascontiguousarray(y, np.float64).reshape(-1)
        return np.ndarray(ne[::-1], np.float64, flat, offset // size * 8, [n // size * 8 for n in (nb or _strides(type, ne))[::-1]])


def main(build: Callable, script: str, *, device: str, ggml: str, tolerance: float) -> None:
    """Run a script's op, print how far it is from the reference and from float64, and exit: 0 within `tolerance`, else 1."""
    parser = argparse.ArgumentParser(description="Run one op and compare it with the value it had elsewhere.")
    parser.add_argument("--device", default=device)
    parser.add_argument("--ggml", default=ggml)
    parser.add_argument("--tolerance", type=float, default=tolerance)
    args = parser.parse_args()
    try:
        one = OneOp.load(Path(script).with_suffix(SUFFIX))
        lines, same = run(build, one, device=args.device, ggml_name=args.ggml, tolerance=args.tolerance)
    except QGraphError as error:
        raise SystemExit(f"error: {error}") from None
    print("\n".join(lines))
    raise SystemExit(0 if same else 1)


def run(build: Callable, one: OneOp, *, device: str, ggml_name: str, tolerance: float) -> tuple[list[str], bool]:
    """Build and compute the op → what to print, and whether it gives the reference's value."""
    provider = ggml.provider(ggml_name)
    want = one.arrays[REFERENCE]
    with OnDevice(one.arrays, device) as g:
        y = build(g)
        if not ggml.device(device).supports_op(_kernel(y)):
            raise GraphError(f"{device} of ggml {provider.version} does not support {one.op} of these operands")
        got = g.compute(y).reshape(want.shape)
    in_order = np.sort if one.op == UNORDERED else np.asarray
    off = _off(in_order(got), in_order(want))
    where = f"{device}, ggml {provider.version} of {provider.name}"
    lines = [f"{one.op} {list(trimmed(one.result.ne))} on {where}", f"to the reference  NMSE {off:.2e}"]
    try:
        exact = build(InFloat64(one.arrays)).reshape(want.shape)
        mine, theirs = (_off(in_order(x), in_order(exact)) for x in (got, want))
        lines.append(f"to float64        NMSE {mine:.2e} here, {theirs:.2e} of the reference")
    except NotKnown as error:
        lines.append(f"to float64        no form of {error} is known")
    return lines, off <= tolerance


def _kernel(y: ggml.Tensor) -> ggml.Tensor:
    while y.op in ("VIEW", "PERMUTE"):
        y = y.src[0]
    return y


def _off(got: np.ndarray, want: np.ndarray) -> float:
    """Return the NMSE where `want` is a number; infinity where one side is and the other is not."""
    written = ~np.isnan(want)
    if not np.array_equal(np.isfinite(got[written]), np.isfinite(want[written])):
        return np.inf
    finite = np.isfinite(want)
    return nmse(got[finite], want[finite])


def stored(raw: np.ndarray, type: str) -> np.ndarray:
    """Return bytes as numbers of their own type where a file can hold those."""
    return raw.view(_NUMPY[type]) if type in _NUMPY and np.dtype(_NUMPY[type]) in map(np.dtype, DTYPES.values()) else raw
