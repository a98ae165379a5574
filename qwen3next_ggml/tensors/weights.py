"""Weights on their devices: place → upload (level 4).

A weight is mapped from the file where device and alignment allow, else copied; it is converted when the graph needs it
otherwise. Knows no architecture.
"""

from __future__ import annotations

import mmap as mmap_module
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from .. import ggml
from ..errors import OptionError
from ..ggml import GgmlType, types
from ..gguf_file import GgufFile, TensorInfo
from .policy import LoadPolicy, choose_policy
from .table import Checked, Decl, TensorTable

MAPPED, COPIED, REPACKED = "mapped", "copied", "repacked"


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes: tensors of one place share a context and its buffers."""

    device: ggml.Device
    how: str
    buffer_type: ggml.BufferType | None = None  # REPACKED only
    shard: int = 0  # MAPPED only


@dataclass(frozen=True)
class _Item:
    """One tensor to create: its place, and how its bytes are made unless they are mapped."""

    decl: Decl
    type: GgmlType
    place: _Place
    info: TensorInfo
    read: Callable[[], np.ndarray]


class Weights:
    """Tensors by GGUF name: `w.token_embd`, `w.blk[il].attn_norm`; None where optional and absent.

    Owns the buffers; `close()` frees them and may be called twice.
    """

    def __init__(self, table: TensorTable, checked: Checked, devices: Sequence[ggml.Device]):
        self.by_name: dict[str, ggml.Tensor] = {}
        self.scales: dict[ggml.Tensor, ggml.Tensor] = {}
        self.notes: list[str] = []
        self.leftovers = checked.leftovers
        self.mapped_nbytes = self.copied_nbytes = self.repacked_nbytes = 0
        self.policy: LoadPolicy | None = None
        self.placed: dict[str, str] = {}  # name → mapped, copied or repacked
        self._devices = tuple(devices)
        self._stack = ExitStack()
        self.blk = [SimpleNamespace() for _ in devices]
        for decl in table.decls():
            self._set(decl, None)

    @property
    def nbytes(self) -> int:
        return self.mapped_nbytes + self.copied_nbytes + self.repacked_nbytes

    @property
    def planned(self) -> dict[str, int]:
        """Bytes by place, mapped, copied or repacked, of tensors with data or without."""
        totals: dict[str, int] = {}
        for name, how in self.placed.items():
            totals[how] = totals.get(how, 0) + self.by_name[name].nbytes
        return totals

    def device_of(self, il: int) -> ggml.Device:
        """Return the device that holds block il."""
        return self._devices[il]

    def _set(self, decl: Decl, tensor: ggml.Tensor | None) -> None:
        setattr(self if decl.layer is None else self.blk[decl.layer], decl.attribute, tensor)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_weights(
    file: GgufFile,
    table: TensorTable,
    devices: ggml.Device | Sequence[ggml.Device],
    *,
    repack: bool | str = False,
    mmap: bool | str = True,
    data: bool = True,
    n_threads: int = 1,
) -> Weights:
    """Check the file against the table and put its tensors on their devices.

    `devices` is one for all, or a list that the blocks are spread over evenly, in order. `repack` and `mmap` as
    `choose_policy`: weights rewritten for the CPU's kernels, the others mapped or copied. `data=False` creates the tensors
    without storage, enough to build graphs. `n_threads` copy and rewrite at once.
    Raises TensorError as `TensorTable.check`, BackendError when a device has no room, OptionError as `choose_policy`.
    """
    nbytes = sum(info.nbytes for info in file.tensors.values())
    policy = choose_policy(ggml.provider().version, ggml.device("CPU").features, nbytes, repack=repack, mmap=mmap)
    checked = table.check(file)
    n_layer = 1 + max((decl.layer for decl in table.decls() if decl.layer is not None), default=0)
    weights = Weights(table, checked, _spread(devices, n_layer))
    try:
        planner, weights.policy = _Planner(file, weights, policy), policy
        items = [item for decl, info in checked.found for item in planner.items(decl, info)]
        items += planner.ties(table, checked)
        _create(file, weights, items, data, policy, n_threads)
        _bind(weights, table, checked, items)
    except BaseException:
        weights.close()
        raise
    return weights


def _spread(devices: ggml.Device | Sequence[ggml.Device], n_layer: int) -> list[ggml.Device]:
    devices = list(devices) if isinstance(devices, Sequence) else [devices]
    if not 1 <= len(devices) <= n_layer:
        raise OptionError(f"{len(devices)} devices for {n_layer} blocks, expected 1 to {n_layer}")
    return [devices[il * len(devices) // n_layer] for il in range(n_layer)]


class _Planner:
    """Decides for each tensor of the file what is created from it, and where."""

    def __init__(self, file: GgufFile, weights: Weights, policy: LoadPolicy):
        self.file, self.weights, self.policy = file, weights, policy
        self.repack_types: dict[tuple, ggml.BufferType | None] = {}

    def items(self, decl: Decl, info: TensorInfo) -> Iterable[_Item]:
        type = GgmlType.of(info.type_id)
        if decl.op is None and type.name != "f32":
            self.weights.notes.append(f"{decl.name} converted from {type.name} to f32")
            place = _Place(self.device(decl), COPIED)
            return [_Item(decl, GgmlType.of("f32"), place, info, lambda: self.floats(info, type))]
        if decl.resplit:
            self.weights.notes.append(f"{decl.name} split into {' and '.join(part.attribute for part, _ in decl.parts)}")
            return [self.item(part, info, type, lambda rows=rows: self.rows(info, rows())) for part, rows in decl.parts]
        return [self.item(decl, info, type, lambda: self.file.data(info.name), whole=True)]

    def item(self, decl: Decl, info: TensorInfo, type: GgmlType, read: Callable, whole: bool = False) -> _Item:
        device = self.device(decl)
        buffer_type = self.repack_type(device, decl, type) if self.policy.repacks(decl, type.name) else None
        if buffer_type:
            place = _Place(device, REPACKED, buffer_type)
        elif whole and self.policy.mmap and device.maps_host_memory and info.offset % device.buffer_type().alignment == 0:
            place = _Place(device, MAPPED, shard=info.shard)
        else:
            place = _Place(device, COPIED)
        return _Item(decl, type, place, info, read)

    def ties(self, table: TensorTable, checked: Checked) -> list[_Item]:
        """Plan second copies of tensors that stand in for absent ones on another device."""
        found, items = {decl.name: info for decl, info in checked.found}, []
        for decl in table.layout():
            info = found.get(table.ties.get(decl.name, ""))
            if info and decl.name not in found and self.device(decl) != self.weights.device_of(0):
                items.append(self.item(decl, info, GgmlType.of(info.type_id), lambda i=info: self.file.data(i.name), True))
        return items

    def device(self, decl: Decl) -> ggml.Device:
        """Blocks lie on their device, the embedding with the first of them, the head with the last."""
        if decl.layer is not None:
            return self.weights.device_of(decl.layer)
        return self.weights.device_of(0 if decl.op == "get_rows" else -1)

    def floats(self, info: TensorInfo, type: GgmlType) -> np.ndarray:
        return types.dequantize(type, self.rows(info), info.ne[0])

    def rows(self, info: TensorInfo, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        n_rows = info.ne[1] if len(info.ne) > 1 else 1
        return self.file.data(info.name).reshape(-1, n_rows, info.nbytes // int(np.prod(info.ne[1:])))[:, rows]

    def repack_type(self, device: ggml.Device, decl: Decl, type: GgmlType) -> ggml.BufferType | None:
        """Find a buffer type in whose own layout the device computes this product."""
        key = (device.name, decl.op, type.id, decl.ne)
        if key not in self.repack_types:
            usable = (b for b in device.extra_buffer_types() if _computes_from(device, b, decl, type))
            self.repack_types[key] = next(usable, None)
        return self.repack_types[key]


def _computes_from(device: ggml.Device, buffer_type: ggml.BufferType, decl: Decl, type: GgmlType) -> bool:
    """Ask the device, with a weight in such a buffer; its pages are never touched."""
    with ggml.Context(4) as ctx:
        ops, w = ggml.Ops(ctx), ctx.new_tensor(type, *decl.ne)
        with buffer_type.alloc(buffer_type.alloc_size(w)) as buffer:
            buffer.place(w, 0)
            x = ctx.new_tensor(types.F32, decl.ne[0], 1, 1)
            if decl.op == "mul_mat":
                return device.supports_op(ops.mul_mat(w, x))
            return device.supports_op(ops.mul_mat_id(w, x, ctx.new_tensor(types.I32, 1, 1)))


def _create(file: GgufFile, weights: Weights, items: list[_Item], data: bool, policy: LoadPolicy, n_threads: int) -> None:
    """Make the tensors of each place, give them storage and fill what is not mapped."""
    for place in dict.fromkeys(item.place for item in items):
        inside = [item for item in items if item.place == place]
        ctx = weights._stack.enter_context(ggml.Context(len(inside)))
        for item in inside:
            weights.by_name[item.decl.name] = ctx.new_tensor(item.type, *item.decl.ne, name=item.decl.name)
            weights.placed[item.decl.name] = place.how
        if not data:
            continue
        if place.how == MAPPED:
            _map(file, weights, place, inside, policy.huge)
        else:
            buffer = ggml.alloc_tensors(ctx, place.buffer_type or place.device.buffer_type())
            weights._stack.enter_context(buffer).set_usage("weights")
            if policy.huge and place.device.kind == "cpu":
                ggml.advise_huge_pages(buffer.base, buffer.size)
            _fill(file, weights, inside, n_threads)
        nbytes = sum(weights.by_name[item.decl.name].nbytes for item in inside)
        setattr(weights, f"{place.how}_nbytes", getattr(weights, f"{place.how}_nbytes") + nbytes)


def _map(file: GgufFile, weights: Weights, place: _Place, items: list[_Item], huge: bool) -> None:
    """Let tensors lie in the file's map."""
    shard = file.shards[place.shard]
    if huge:
        # what is not in the page cache yet is read into huge pages where the file system can; what is there stays as it is
        ggml.advise_huge_pages(shard.address, shard.bytes.nbytes)
    buffer = place.device.buffer_from_host(shard.address, shard.bytes.nbytes, keep=shard)
    weights._stack.enter_context(buffer).set_usage("weights")
    for item in items:
        buffer.place(weights.by_name[item.decl.name], item.info.offset)


def _fill(file: GgufFile, weights: Weights, items: list[_Item], n_threads: int) -> None:
    """Read tensors and hand their bytes to their buffers, several at once: ggml copies and rewrites without the GIL."""

    def fill(item: _Item) -> None:
        weights.by_name[item.decl.name].set(np.ascontiguousarray(item.read()))
        _forget(file, item.info)

    with ThreadPoolExecutor(n_threads) as pool:
        deque(pool.map(fill, items), maxlen=0)


def _forget(file: GgufFile, info: TensorInfo) -> None:
    """Take the pages of a tensor that has been copied out of this process; they stay in the page cache."""
    page = mmap_module.PAGESIZE
    start, end = -(-info.offset // page) * page, (info.offset + info.nbytes) // page * page
    if end > start and hasattr(mmap_module, "MADV_DONTNEED"):
        file.shards[info.shard].map.madvise(mmap_module.MADV_DONTNEED, start, end - start)


def _bind(weights: Weights, table: TensorTable, checked: Checked, items: list[_Item]) -> None:
    """Hang the tensors under their names, tie what is tied, attach scales."""
    for item in items:
        weights._set(item.decl, weights.by_name[item.decl.name])
    for name, to in table.ties.items():
        if name not in weights.by_name and to in weights.by_name:
            setattr(weights, Decl(name, (), "").attribute, weights.by_name[to])
    for weight, scale in checked.scales.items():
        weights.scales[weights.by_name[weight]] = weights.by_name[scale]
    for how, types in _repacked_summary(items).items():
        weights.notes.append(f"{how}: {types}")


def _repacked_summary(items: list[_Item]) -> dict[str, str]:
    counts = Counter((item.place.buffer_type.name, item.type.name) for item in items if item.place.how == REPACKED)
    summary: dict[str, list[str]] = {}
    for (buffer_type, type_name), n in counts.items():
        summary.setdefault(f"repacked as {buffer_type}", []).append(f"{n} x {type_name}")
    return {how: ", ".join(types) for how, types in summary.items()}
