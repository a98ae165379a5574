"""Weights on their devices: place → upload (level 4).

A weight is mapped from the file where device and alignment allow, else copied; it is converted when the graph needs it
otherwise. Knows no architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from types import SimpleNamespace

import numpy as np

from .. import ggml
from ..errors import OptionError
from ..ggml import GgmlType, types
from ..gguf_file import GgufFile, TensorInfo
from .policy import LoadPolicy, choose_policy
from .storage import COPIED, MAPPED, REPACKED, Item, Place, Stack, create
from .table import Checked, Decl, TensorTable

class Weights:
    """Tensors by GGUF name: `w.token_embd`, `w.blk[il].attn_norm`; None where optional and absent.

    `scales`: weight → its scale. `stacks`: first of several weights that are rows of one tensor → all of them. `one_more`: first of those
    with many matrices → them and one behind. `repacked`: weight that is held as it is stored → the same rewritten for the CPU's
    kernels, for few columns. Owns the buffers; `close()` frees them and may be called twice.
    """

    def __init__(self, table: TensorTable, checked: Checked, devices: Sequence[ggml.Device]):
        self.by_name: dict[str, ggml.Tensor] = {}
        self.scales: dict[ggml.Tensor, ggml.Tensor] = {}
        self.stacks: dict[ggml.Tensor, Stack] = {}
        self.one_more: dict[ggml.Tensor, ggml.Tensor] = {}
        self.repacked: dict[ggml.Tensor, ggml.Tensor] = {}
        self.beside: dict[str, ggml.Tensor] = {}
        self.notes: list[str] = []
        self.leftovers = checked.leftovers
        self.policy: LoadPolicy | None = None
        self.placed: dict[str, str] = {}  # name → mapped, copied or repacked
        self.planned: Counter[str] = Counter()  # mapped, copied or repacked → bytes, of tensors with data or without
        self._devices = tuple(devices)
        self._stack = ExitStack()
        self.blk = [SimpleNamespace() for _ in devices]
        for decl in table.decls():
            self._set(decl, None)

    @property
    def for_graphs(self) -> dict[str, dict]:
        """What a GraphBuilder has to know of the weights beside themselves."""
        return {"scales": self.scales, "stacks": self.stacks, "one_more": self.one_more, "repacked": self.repacked}

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
    version, features = ggml.provider().version, ggml.device("CPU").features
    policy = choose_policy(version, features, nbytes, repack=repack, mmap=mmap)
    checked = table.check(file)
    n_layer = 1 + max((decl.layer for decl in table.decls() if decl.layer is not None), default=0)
    weights = Weights(table, checked, _spread(devices, n_layer))
    try:
        planner, weights.policy = _Planner(file, weights, policy), policy
        items = [item for decl, info in checked.found for item in planner.items(decl, info)]
        items += planner.ties(table, checked)
        create(file, weights, items, table, data, policy, n_threads)
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

    def items(self, decl: Decl, info: TensorInfo) -> Iterable[Item]:
        type = GgmlType.of(info.type_id)
        if decl.op is None and type.name != "f32":
            self.weights.notes.append(f"{decl.name} converted from {type.name} to f32")
            place = Place(self.device(decl), COPIED)
            return [Item(decl, GgmlType.of("f32"), place, info, lambda: self.floats(info, type))]
        if decl.resplit:
            self.weights.notes.append(f"{decl.name} split into {' and '.join(part.attribute for part, _ in decl.parts)}")
            parts = (self.places(part, info, type, lambda rows=rows: self.rows(info, rows())) for part, rows in decl.parts)
            return list(chain.from_iterable(parts))
        return self.places(decl, info, type)

    def places(self, decl: Decl, info: TensorInfo, type: GgmlType, make: Callable | None = None) -> list[Item]:
        """Plan a weight where it is multiplied: rewritten, as it is stored, or both."""
        device = self.device(decl)
        buffer_type = self.repack_type(device, decl, type) if self.policy.repacks(decl) else None
        both = buffer_type is not None and self.policy.keeps(type.name)
        found = [Item(decl, type, Place(device, REPACKED, buffer_type, beside=both), info, make)] if buffer_type else []
        if buffer_type and not both:
            return found
        aligned = info.offset % device.buffer_type().alignment == 0
        mapped = make is None and self.policy.maps(decl, both) and device.maps_host_memory and aligned
        place = Place(device, MAPPED, shard=info.shard) if mapped else Place(device, COPIED)
        return [Item(decl, type, place, info, make), *found]

    def ties(self, table: TensorTable, checked: Checked) -> list[Item]:
        """Plan second copies of tensors that stand in for absent ones on another device."""
        found, items = {decl.name: info for decl, info in checked.found}, []
        for decl in table.layout():
            info = found.get(table.ties.get(decl.name, ""))
            if info and decl.name not in found and self.device(decl) != self.weights.device_of(0):
                items += self.places(decl, info, GgmlType.of(info.type_id))
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


def _bind(weights: Weights, table: TensorTable, checked: Checked, items: list[Item]) -> None:
    """Hang the tensors under their names, tie what is tied, attach scales."""
    for item in items:
        weights._set(item.decl, weights.by_name[item.decl.name])
    for name, to in table.ties.items():
        if name not in weights.by_name and to in weights.by_name:
            setattr(weights, Decl(name, (), "").attribute, weights.by_name[to])
    for weight, scale in checked.scales.items():
        weights.scales[weights.by_name[weight]] = weights.by_name[scale]
    for stack in list(weights.stacks.values()):
        if not checked.scales.keys().isdisjoint(part.name for part in stack.parts):
            # each product is scaled by itself
            del weights.stacks[stack.parts[0]]
    scaled = {weight.view_src for weight in weights.scales}
    weights.one_more = {weight: whole for weight, whole in weights.one_more.items() if whole not in scaled}
    weights.repacked = {weights.by_name[name]: tensor for name, tensor in weights.beside.items()}
    for how, counted in _repacked_summary(items).items():
        weights.notes.append(f"{how}: {counted}")


def _repacked_summary(items: list[Item]) -> dict[str, str]:
    counts = Counter((item.place.buffer_type.name, item.type.name) for item in items if item.place.how == REPACKED)
    summary: dict[str, list[str]] = {}
    for (buffer_type, type_name), n in counts.items():
        summary.setdefault(f"repacked as {buffer_type}", []).append(f"{n} x {type_name}")
    return {how: ", ".join(types) for how, types in summary.items()}
