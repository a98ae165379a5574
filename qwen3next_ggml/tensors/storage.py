"""Memory for planned tensors: mapped from the file, copied, or rewritten for the CPU's kernels (level 4).

Knows where each tensor is to lie, not why.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import numpy as np

from .. import ggml
from ..ggml import GgmlType
from ..gguf_file import GgufFile, TensorInfo
from .policy import LoadPolicy
from .table import Decl, TensorTable

if TYPE_CHECKING:
    from .weights import Weights

MAPPED, COPIED, REPACKED = "mapped", "copied", "repacked"


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: tensors of one place share a context and its buffers."""

    device: ggml.Device
    how: str
    buffer_type: ggml.BufferType | None = None  # REPACKED only
    beside: bool = False  # REPACKED only: the weight lies elsewhere too, as it is stored
    shard: int = 0  # MAPPED only


@dataclass(frozen=True)
class Item:
    """One tensor to create: its place, and how its bytes are made where they are not those of the file."""

    decl: Decl
    type: GgmlType
    place: Place
    info: TensorInfo
    make: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class Group:
    """Tensors that are rows of one, and `behind` those that are one more matrix of it."""

    items: list[Item]
    behind: list[Item] = field(default_factory=list)

    @property
    def is_one(self) -> bool:
        """Say whether this is a tensor by itself."""
        return len(self.items) == 1 and not self.behind

    @property
    def ne(self) -> tuple[int, int, int]:
        """Return the shape of all rows: n_in, Σ n_out, and how many matrices."""
        n_in, _, n_matrices = (*self.items[0].decl.ne, 1, 1)[:3]
        return n_in, sum(map(_n_out, self.items)), n_matrices

    def takes(self, behind: list[Item]) -> bool:
        """Say whether these have the type and the shape of one more matrix."""
        return behind[0].type == self.items[0].type and Group(behind).ne == (*self.ne[:2], 1)


@dataclass(frozen=True)
class Stack:
    """Weights that are rows of one tensor, and where the product of each lies in the product of all: (n_out, byte offset)."""

    whole: ggml.Tensor
    parts: tuple[ggml.Tensor, ...]
    cuts: tuple[tuple[int, int], ...]

    @cached_property
    def row_size(self) -> int:
        """Bytes of a column of the product of all."""
        return 4 * sum(n_out for n_out, _ in self.cuts)


def create(
    file: GgufFile, weights: Weights, items: list[Item], table: TensorTable, data: bool, policy: LoadPolicy, n_threads: int
) -> None:
    """Make the tensors of each place, give them storage and fill what is not mapped.

    What is copied into the host's memory and multiplied together becomes views of one tensor, their rows one behind the other.
    """
    for place in dict.fromkeys(item.place for item in items):
        inside = [item for item in items if item.place == place]
        tensors = weights.beside if place.beside else weights.by_name
        groups = _grouped(inside, table) if place.how != MAPPED and place.device.kind == "cpu" else [Group([item]) for item in inside]
        # beside the parts at most the whole, its matrices but the last, and the last
        ctx = weights._stack.enter_context(ggml.Context(len(inside) + 3 * sum(not group.is_one for group in groups)))
        for group in groups:
            _declare(ctx, tensors, weights, group)
        weights.planned[place.how] += sum(size_of(tensors[item.decl.name]) for item in inside)
        if not place.beside:
            weights.placed |= dict.fromkeys((item.decl.name for item in inside), place.how)
        if not data:
            continue
        if place.how == MAPPED:
            _map(file, weights, place, inside, policy.huge)
        else:
            buffer = ggml.alloc_tensors(ctx, place.buffer_type or place.device.buffer_type())
            weights._stack.enter_context(buffer).set_usage("weights")
            if policy.huge and place.device.kind == "cpu":
                ggml.advise_huge_pages(buffer.base, buffer.size)
            _fill(file, tensors, groups, n_threads)


def _grouped(items: list[Item], table: TensorTable) -> list[Group]:
    """Return those that are multiplied together and can be rows of one tensor, in their order, and each other one by itself."""
    # rewritten rows are woven into each other: of many matrices in a tensor no part is a tensor again
    by_name = {item.decl.name: item for item in items if item.place.how == COPIED or len(item.decl.ne) == 2}
    runs = []
    for names in table.together:
        present = [by_name[name] for name in names if name in by_name]
        alike = (list(run) for _, run in groupby(present, key=lambda item: (item.type, item.decl.ne[0], item.decl.ne[2:])))
        runs += [run for run in alike if len(run) > 1]
    inside = {item.decl.name for run in runs for item in run}
    groups = {_names(run): Group(run) for run in [*runs, *([item] for item in items if item.decl.name not in inside)]}
    for many, one in table.behind:
        if many in groups and one in groups and many[0] in by_name and groups[many].takes(groups[one].items):
            groups[many] = Group(groups[many].items, groups.pop(one).items)
    return list(groups.values())


def _joint_name(items: Sequence[Item]) -> str:
    first, *rest = (name.removesuffix(".weight") for name in _names(items))
    return "+".join([first, *(name.rpartition(".")[2] for name in rest)]) + ".weight"


def _n_out(item: Item) -> int:
    return (*item.decl.ne, 1)[1]


def _names(items: Sequence[Item]) -> tuple[str, ...]:
    return tuple(item.decl.name for item in items)


def _declare(ctx: ggml.Context, tensors: dict[str, ggml.Tensor], weights: Weights, group: Group) -> None:
    """Create the tensors of a group by name, several as parts [n_in, n_out, …] of one tensor [n_in, Σ n_out, …]."""
    if group.is_one:
        [item] = group.items
        tensors[item.decl.name] = ctx.new_tensor(item.type, *item.decl.ne, name=item.decl.name)
        return
    n_in, n_out, n_matrices = group.ne
    # ggml keeps 63 bytes of a name
    name = _joint_name([*group.items, *group.behind[:1]])
    whole = ctx.new_tensor(group.items[0].type, n_in, n_out, n_matrices + bool(group.behind), name=name)
    _cut(ctx, tensors, weights, whole, group.items, range(n_matrices))
    if group.behind:
        _cut(ctx, tensors, weights, whole, group.behind, range(n_matrices, n_matrices + 1))
        weights.one_more[tensors[group.items[0].decl.name]] = whole


def _cut(
    ctx: ggml.Context, tensors: dict[str, ggml.Tensor], weights: Weights, whole: ggml.Tensor, items: list[Item], matrices: range
) -> None:
    """Make parts of the rows of some matrices of `whole`, and note that several together are all of these rows."""
    ends = list(accumulate(map(_n_out, items)))
    starts = [0, *ends[:-1]]
    parts = [
        ctx.new_part(whole, start, end - start, name=item.decl.name, matrices=matrices) for item, start, end in zip(items, starts, ends)
    ]
    tensors |= {part.name: part for part in parts}
    if len(parts) > 1:
        all_rows = whole if len(matrices) == whole.ne[2] else ctx.new_part(whole, 0, ends[-1], name=_joint_name(items), matrices=matrices)
        cuts = tuple((end - start, 4 * start) for start, end in zip(starts, ends))
        weights.stacks[parts[0]] = Stack(all_rows, tuple(parts), cuts)


def size_of(tensor: ggml.Tensor) -> int:
    """Return the bytes of a tensor's elements, gaps between them left out."""
    return tensor.type.row_size(tensor.nelements)


def _map(file: GgufFile, weights: Weights, place: Place, items: list[Item], huge: bool) -> None:
    """Let tensors lie in the file's map."""
    shard = file.shards[place.shard]
    if huge:
        # what is not in the page cache yet is read into huge pages where the file system can; what is there stays as it is
        ggml.advise_huge_pages(shard.address, shard.bytes.nbytes)
    buffer = place.device.buffer_from_host(shard.address, shard.bytes.nbytes, keep=shard)
    weights._stack.enter_context(buffer).set_usage("weights")
    for item in items:
        buffer.place(weights.by_name[item.decl.name], item.info.offset)


def _fill(file: GgufFile, tensors: dict[str, ggml.Tensor], groups: list[Group], n_threads: int) -> None:
    """Read tensors into their buffers or have ggml copy and rewrite them, several at once: neither holds the GIL."""

    def fill(item: Item) -> None:
        tensor, info = tensors[item.decl.name], item.info
        memory = tensor.memory() if item.make is None else None
        if memory is not None:
            file.shards[info.shard].read_into(_pieces(tensor, memory), info.offset)
        else:
            tensor.set(file.data(info.name) if item.make is None else np.ascontiguousarray(item.make()))
            _forget(file, info)

    # threads that touch new pages of one tensor wait for each other
    with ThreadPoolExecutor(n_threads) as pool:
        deque(pool.map(lambda group: deque(map(fill, [*group.items, *group.behind]), maxlen=0), groups), maxlen=0)


def _pieces(tensor: ggml.Tensor, memory: memoryview) -> Iterator[memoryview]:
    """Yield the parts of a weight's memory [n_in, n_out, n_expert] that are its own, experts apart where something lies between them."""
    if tensor.is_contiguous:
        yield memory
        return
    n_out, n_expert = tensor.ne[1:3]
    _, nb1, nb2, _ = tensor.nb
    for i in range(n_expert):
        yield memory[i * nb2 : i * nb2 + n_out * nb1]


def _forget(file: GgufFile, info: TensorInfo) -> None:
    """Take the pages of a tensor that has been copied out of this process; they stay in the page cache."""
    page = mmap.PAGESIZE
    start, end = -(-info.offset // page) * page, (info.offset + info.nbytes) // page * page
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        file.shards[info.shard].map.madvise(mmap.MADV_DONTNEED, start, end - start)
