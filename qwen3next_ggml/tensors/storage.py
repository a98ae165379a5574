"""Memory for planned tensors: mapped from the file, copied, or rewritten for the CPU's kernels (level 4).

Knows where each tensor is to lie, not why.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .. import ggml
from ..ggml import GgmlType
from ..gguf_file import GgufFile, TensorInfo
from .policy import LoadPolicy
from .table import Decl

if TYPE_CHECKING:
    from .weights import Weights

MAPPED, COPIED, REPACKED = "mapped", "copied", "repacked"


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: tensors of one place share a context and its buffers."""

    device: ggml.Device
    how: str
    buffer_type: ggml.BufferType | None = None  # REPACKED only
    shard: int = 0  # MAPPED only


@dataclass(frozen=True)
class Item:
    """One tensor to create: its place, and how its bytes are made where they are not those of the file."""

    decl: Decl
    type: GgmlType
    place: Place
    info: TensorInfo
    make: Callable[[], np.ndarray] | None = None


def create(file: GgufFile, weights: Weights, items: list[Item], data: bool, policy: LoadPolicy, n_threads: int) -> None:
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


def _fill(file: GgufFile, weights: Weights, items: list[Item], n_threads: int) -> None:
    """Read tensors into their buffers or have ggml copy and rewrite them, several at once: neither holds the GIL."""

    def fill(item: Item) -> None:
        tensor, info = weights.by_name[item.decl.name], item.info
        memory = tensor.memory() if item.make is None else None
        if memory is not None:
            file.shards[info.shard].read_into(memory, info.offset)
        else:
            tensor.set(file.data(info.name) if item.make is None else np.ascontiguousarray(item.make()))
            _forget(file, info)

    with ThreadPoolExecutor(n_threads) as pool:
        deque(pool.map(fill, items), maxlen=0)


def _forget(file: GgufFile, info: TensorInfo) -> None:
    """Take the pages of a tensor that has been copied out of this process; they stay in the page cache."""
    page = mmap.PAGESIZE
    start, end = -(-info.offset // page) * page, (info.offset + info.nbytes) // page * page
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        file.shards[info.shard].map.madvise(mmap.MADV_DONTNEED, start, end - start)
