"""What tensors a model has, and whether a file holds them (level 4).

An architecture declares names, shapes and uses before a byte is read; `check` compares that with a file's tensor infos.
Knows no device and reads no data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np

from ..errors import TensorError
from ..gguf_file import GgufFile, TensorInfo

# integer types, double, and the two types ggml only ever makes of activations
NOT_WEIGHTS = frozenset({"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k"})


@dataclass(frozen=True)
class Decl:
    """One tensor the model may have.

    `op` is the ggml op that reads it as it is stored: mul_mat, mul_mat_id or get_rows; None means it is read value by
    value and has to be F32. `parts` says which tensors it is made of: (tensor, function that returns its rows in this one),
    rows counted along the second dimension; with `resplit` it is taken apart into them at load.
    """

    name: str
    ne: tuple[int, ...]
    role: str
    op: str | None = None
    required: bool = True
    layer: int | None = None
    load: bool = True
    parts: tuple[tuple[Decl, Callable[[], np.ndarray]], ...] = field(default=(), compare=False)
    resplit: bool = False

    @property
    def attribute(self) -> str:
        """Name under which weights carry it: without block and `.weight`, other dots as underscores."""
        return re.sub(r"^blk\.\d+\.", "", self.name).removesuffix(".weight").replace(".", "_")

    def created(self) -> tuple[Decl, ...]:
        """Return the tensors that loading this one makes: its parts, or itself."""
        return tuple(part for part, _ in self.parts) if self.resplit else (self,)

    def __str__(self) -> str:
        return f"{self.name} [{_shape(self.ne)}]"


@dataclass(frozen=True)
class Choice:
    """Layouts of which a file holds one; the first that is complete is taken."""

    what: str
    layer: int
    layouts: tuple[tuple[Decl, ...], ...]
    load: bool


@dataclass(frozen=True)
class Kind:
    """What a block is by the metadata, and which tensors would belie it."""

    layer: int
    kind: str
    not_with: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """A table matched with a file: what to load, what stays in the file, what nobody declared."""

    found: tuple[tuple[Decl, TensorInfo], ...]
    unloaded: tuple[tuple[Decl, TensorInfo], ...]
    scales: Mapping[str, str]  # name of a weight that is created → name of its scale
    leftovers: tuple[str, ...]


def stacked(decls: Sequence[Decl]) -> tuple[tuple[Decl, Callable[[], np.ndarray]], ...]:
    """Return parts that follow each other, in order."""
    # rows are listed when they are used: before the file is checked, a width from its header may be anything
    ends = accumulate(decl.ne[1] for decl in decls)
    return tuple((decl, partial(np.arange, end - decl.ne[1], end)) for decl, end in zip(decls, ends))


class TensorTable:
    """The declarations of one model, in the order an architecture makes them."""

    def __init__(self) -> None:
        self.entries: list[Decl | Choice] = []
        self.kinds: list[Kind] = []
        self.ties: dict[str, str] = {}
        self.together: list[tuple[str, ...]] = []
        self.behind: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def declare(self, name: str, ne: tuple[int, ...], *, role: str, **options) -> None:
        """Add a tensor of shape `ne` (ggml order); options are the other fields of `Decl`."""
        self.entries.append(Decl(name, ne, role, **options))

    def tie(self, name: str, to: str) -> None:
        """Let an optional tensor be another one where the file has none."""
        self.ties[name] = to

    def multiply_together(self, *names: str) -> None:
        """Say that these weights are multiplied with the same vectors: where they may lie anywhere, they are laid one behind the other."""
        self.together.append(names)

    def lie_behind(self, many: tuple[str, ...], one: tuple[str, ...]) -> None:
        """Say that `one`, weights of a matrix each, are like `many`, of several: where they may, they lie behind the last of those."""
        self.behind.append((many, one))

    def block(self, il: int, *, role: str | None = None, load: bool = True) -> Block:
        """Return a view that declares tensors of block il; a role given here holds for all of them."""
        return Block(self, il, role, load)

    def decls(self) -> Iterator[Decl]:
        """Yield every declared tensor, those of all layouts included."""
        for entry in self.entries:
            yield from (entry,) if isinstance(entry, Decl) else (d for layout in entry.layouts for d in layout)

    def layout(self, prefer: Collection[str] = ()) -> list[Decl]:
        """List the tensors of one complete file: of each choice the first layout, or the one with a preferred name."""
        chosen: list[Decl] = []
        for entry in self.entries:
            if isinstance(entry, Decl):
                chosen.append(entry)
            else:
                wanted = (layout for layout in entry.layouts if any(d.attribute in prefer for d in layout))
                chosen += next(wanted, entry.layouts[0])
        return chosen

    def check(self, file: GgufFile) -> Checked:
        """Match the declarations with a file's tensor infos; no data is read.

        Raises TensorError: blocks of the wrong kind, missing tensors by name, shapes wanted and found, unusable types.
        """
        infos, where = file.tensors, str(file.path)
        self._check_kinds(infos, where)
        wanted = self._wanted(infos, where)
        missing = [decl for decl in wanted if decl.required and decl.load and decl.name not in infos]
        if missing:
            raise TensorError(f"{where}: missing {_count(missing, 'tensor')}: {_some(map(str, missing))}")
        present = [(decl, infos[decl.name]) for decl in wanted if decl.name in infos]
        scales = [(decl, *scale) for decl, _ in present if decl.op and (scale := _scale(decl, infos))]
        present += [(scale, info) for _, scale, info in scales]
        _check_shapes(present, where)
        _check_types(present, where)
        known = {decl.name for decl, _ in present}
        return Checked(
            found=tuple(pair for pair in present if pair[0].load),
            unloaded=tuple(pair for pair in present if not pair[0].load),
            scales={made.name: scale.name for decl, scale, _ in scales for made in decl.created() if scale.load},
            leftovers=tuple(name for name in infos if name not in known),
        )

    def _check_kinds(self, infos: Mapping[str, TensorInfo], where: str) -> None:
        for kind in self.kinds:
            rivals = [name for name in kind.not_with if name in infos]
            if rivals:
                raise TensorError(
                    f"{where}: block {kind.layer} is {kind.kind} by the metadata, but the file holds {_some(rivals)} in it"
                )

    def _wanted(self, infos: Mapping[str, TensorInfo], where: str) -> list[Decl]:
        wanted: list[Decl] = []
        for entry in self.entries:
            if isinstance(entry, Decl):
                wanted.append(entry)
                continue
            complete = (layout for layout in entry.layouts if all(decl.name in infos for decl in layout))
            layout = next(complete, () if not entry.load else None)
            if layout is None:
                accepted = ", or ".join(" + ".join(decl.attribute for decl in layout) for layout in entry.layouts)
                found = [d.attribute for layout in entry.layouts for d in layout if d.name in infos]
                raise TensorError(
                    f"{where}: block {entry.layer} lacks its {entry.what}: wanted {accepted}; "
                    f"found {'only ' + _some(found) if found else 'none of them'}"
                )
            wanted += layout
        return wanted


@dataclass(frozen=True)
class Block:
    """Declares tensors of one block: names without `blk.N.`."""

    table: TensorTable
    il: int
    role: str | None
    load: bool

    def decl(self, name: str, ne: tuple[int, ...], *, role: str = "", **options) -> Decl:
        """Make a declaration without adding it to the table, for a layout or a part."""
        return Decl(f"blk.{self.il}.{name}", ne, self.role or role, layer=self.il, load=self.load, **options)

    def declare(self, name: str, ne: tuple[int, ...], *, role: str = "", **options) -> None:
        self.table.entries.append(self.decl(name, ne, role=role, **options))

    def declare_one_of(self, what: str, *layouts: Sequence[Decl]) -> None:
        """Add alternatives of which one must be complete; the first complete one is taken."""
        self.table.entries.append(Choice(what, self.il, tuple(map(tuple, layouts)), self.load))

    def multiply_together(self, *names: str) -> None:
        """Do as `TensorTable.multiply_together`."""
        self.table.multiply_together(*self._named(names))

    def lie_behind(self, many: Sequence[str], one: Sequence[str]) -> None:
        """Do as `TensorTable.lie_behind`."""
        self.table.lie_behind(self._named(many), self._named(one))

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"blk.{self.il}.{name}.weight" for name in names)

    def is_kind(self, kind: str, *, not_with: Sequence[str]) -> None:
        """Say what the metadata makes of this block; a file with one of these tensors in it is refused."""
        self.table.kinds.append(Kind(self.il, kind, tuple(f"blk.{self.il}.{name}" for name in not_with)))


def _scale(decl: Decl, infos: Mapping[str, TensorInfo]) -> tuple[Decl, TensorInfo] | None:
    """Find the factor that belongs to a weight: one number, or one per expert."""
    name = decl.name.removesuffix(".weight") + ".scale"
    if name not in infos:
        return None
    ne = (decl.ne[2],) if decl.op == "mul_mat_id" else (1,)
    return replace(decl, name=name, ne=ne, role="scale", op=None, required=False, parts=(), resplit=False), infos[name]


def _check_shapes(present: list[tuple[Decl, TensorInfo]], where: str) -> None:
    wrong = [(decl, info) for decl, info in present if _trimmed(decl.ne) != _trimmed(info.ne)]
    if wrong:
        sentences = (f"{d.name} has shape [{_shape(info.ne)}], wanted [{_shape(d.ne)}]" for d, info in wrong)
        raise TensorError(f"{where}: {_some(sentences)}")


def _check_types(present: list[tuple[Decl, TensorInfo]], where: str) -> None:
    for decl, info in present:
        if info.type_name.lower() in NOT_WEIGHTS:
            raise TensorError(f"{where}: {decl.name} has type {info.type_name}, wanted a float or quantised weight type")


def _trimmed(ne: tuple[int, ...]) -> tuple[int, ...]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return ne


def _shape(ne: tuple[int, ...]) -> str:
    return ", ".join(map(str, ne))


def _count(items: list, noun: str) -> str:
    return f"{len(items)} {noun}{'s' if len(items) > 1 else ''}"


def _some(items, limit: int = 4) -> str:
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
