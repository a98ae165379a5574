"""One GGUF file, or a split set of them: tensor infos, extents, memory maps (level 2).

Tensor data is mapped, never read here. Being cut off, overlapping and lying about sizes are told apart; whether a
tensor is one too few is not known here, and neither is any architecture.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GgufError, TensorError
from ..ggml import GgmlType
from .header import Cursor, KeyValues, read_header
from .shard import Shard

DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME = 63  # bytes, what ggml_tensor.name holds beside its terminator
SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `ne` in ggml order, `offset` in bytes from the start of its shard's file."""

    name: str
    type_id: int
    type_name: str
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    shard: int


def _alignment(where: str, values: dict[str, Any]) -> int:
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise GgufError(f"{where}: general.alignment is {alignment!r}, expected a power of two")
    return alignment


def _read_tensor_infos(cursor: Cursor, n_tensors: int, alignment: int, shard: int) -> dict[str, TensorInfo]:
    """Read the tensor table; offsets become positions in the file once the table's end is known."""
    where = cursor.where
    cursor.room_for(n_tensors, 33, "tensor infos")  # length, one letter, dimension count, one dimension, type, offset
    table = []
    for i in range(n_tensors):
        name = cursor.name(f"the name of tensor {i}", MAX_NAME)
        n_dims = cursor.u32(f"the dimension count of {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise GgufError(f"{where}: tensor {name!r} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        ne = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(n_dims))
        type_id = cursor.u32(f"the type of {name!r}")
        table.append((name, ne, type_id, cursor.u64(f"the offset of {name!r}")))

    data_start = -(-cursor.pos // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    for name, ne, type_id, offset in table:
        if name in infos:
            raise GgufError(f"{where}: tensor {name!r} appears twice")
        if offset % alignment:
            raise GgufError(f"{where}: tensor {name!r} lies at offset {offset}, not a multiple of {alignment}")
        ggml_type = _known_type(where, name, type_id)
        nbytes = _nbytes(where, name, ne, ggml_type)
        infos[name] = TensorInfo(name, type_id, ggml_type.name, ne, data_start + offset, nbytes, shard)
    return infos


def _known_type(where: str, name: str, type_id: int) -> GgmlType:
    try:
        return GgmlType.of(type_id)
    except TensorError:
        raise TensorError(f"{where}: tensor {name!r} has type id {type_id}, which this ggml does not know") from None


def _nbytes(where: str, name: str, ne: tuple[int, ...], ggml_type: GgmlType) -> int:
    shape = " x ".join(map(str, ne))
    if min(ne) < 1 or prod(ne) >= 1 << 63:
        raise GgufError(f"{where}: tensor {name!r} has shape {shape}: dimensions must be positive, their product < 2^63")
    if ne[0] % ggml_type.block_size:
        raise GgufError(
            f"{where}: tensor {name!r} has rows of {ne[0]} values, "
            f"{ggml_type.name} needs a multiple of {ggml_type.block_size}"
        )
    return prod(ne) // ggml_type.block_size * ggml_type.type_size


def _check_extents(where: str, infos: dict[str, TensorInfo], header_end: int, size: int, alignment: int) -> list[str]:
    """Check that tensors lie inside the file and apart from each other; return notes on bytes nobody owns."""
    notes, end, before = [], header_end, "the header"
    for info in sorted(infos.values(), key=lambda info: info.offset):
        if info.offset + info.nbytes > size:
            raise GgufError(
                f"{where}: file too short (cut off?): tensor {info.name!r} wants bytes {info.offset} to "
                f"{info.offset + info.nbytes}, the file has {size} bytes"
            )
        if info.offset < end:
            raise GgufError(f"{where}: tensor {info.name!r} at byte {info.offset} overlaps {before}, which ends at {end}")
        if info.offset - end >= alignment:
            notes.append(f"{info.offset - end} unused bytes before {info.name!r}")
        end, before = info.offset + info.nbytes, repr(info.name)
    if size - end >= alignment:
        notes.append(f"{size - end} bytes after the last tensor")
    return notes


@dataclass(frozen=True)
class _Part:
    """What one file of a set says."""

    shard: Shard
    version: int
    alignment: int
    values: dict[str, Any]
    infos: dict[str, TensorInfo]
    notes: list[str]


def _read_part(path: Path, index: int) -> _Part:
    shard = Shard.open(path)
    cursor = Cursor(str(path), shard.map)
    version, values, n_tensors = read_header(cursor)
    alignment = _alignment(cursor.where, values)
    infos = _read_tensor_infos(cursor, n_tensors, alignment, index)
    notes = _check_extents(cursor.where, infos, cursor.pos, cursor.size, alignment)
    return _Part(shard, version, alignment, values, infos, notes)


def _split_value(part: _Part, key: str) -> int:
    value = part.values.get(key)
    if type(value) is not int:
        raise GgufError(f"{part.shard.path}: {key} is {value!r}, a split file needs an integer")
    return value


def _read_parts(path: Path) -> list[_Part]:
    """Read a file and, when it is one of a split set, all others of the set in order."""
    given = _read_part(path, 0)
    if given.values.get("split.count", 0) in (0, 1):
        return [given]
    count, match = _split_value(given, "split.count"), SPLIT_NAME.fullmatch(path.name)
    if not match or int(match["count"]) != count:
        raise GgufError(f"{path}: one of {count} split files, expected a name like NAME-00001-of-{count:05d}.gguf")
    paths = [path.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for missing in (p for p in paths if not p.exists()):
        raise GgufError(f"{path}: one of {count} split files, but {missing.name} is missing beside it")
    parts = []
    for i, shard_path in enumerate(paths):
        part = _read_part(shard_path, i)
        no, n = _split_value(part, "split.no"), _split_value(part, "split.count")
        if (no, n) != (i, count):
            raise GgufError(f"{shard_path}: says it is split {no} of {n}, its name says {i} of {count} (counted from 0)")
        parts.append(part)
    found, wanted = sum(len(part.infos) for part in parts), _split_value(parts[0], "split.tensors.count")
    if found != wanted:
        raise GgufError(f"{path}: the {count} split files hold {found} tensors, split.tensors.count says {wanted}")
    return parts


class GgufFile:
    """An open model file or split set: metadata, tensor infos, mapped bytes. A context manager."""

    def __init__(self, path: Path, parts: list[_Part]):
        self.path = path
        self.version, self.alignment = parts[0].version, parts[0].alignment
        self.shards = [part.shard for part in parts]
        self.metadata = KeyValues(str(parts[0].shard.path), parts[0].shard.map, parts[0].values)
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        for part in parts:
            for name in self.tensors.keys() & part.infos.keys():
                raise GgufError(f"{part.shard.path}: tensor {name!r} appears in an earlier split file too")
            self.tensors.update(part.infos)
            self.notes += [f"{part.shard.path.name}: {note}" for note in part.notes]

    @classmethod
    def open(cls, path: str | os.PathLike) -> GgufFile:
        """Open a GGUF v2 or v3 file (little endian), or any file of a split set.

        Raises GgufError when it is no GGUF or contradicts itself, TensorError for a tensor type ggml does not know.
        """
        path = Path(path)
        return cls(path, _read_parts(path))

    @property
    def arch(self) -> str:
        """The architecture's name; GgufError when the file has none."""
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise GgufError(f"{self.path}: general.architecture is {arch!r}, expected a name")
        return arch

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(len(shard.map) for shard in self.shards)

    def data(self, name: str) -> np.ndarray:
        """Return the bytes of one tensor as a read-only uint8 array, without a copy."""
        info = self.tensors[name]
        if not self.shards:
            raise GgufError(f"{self.path}: the file is closed")
        return self.shards[info.shard].bytes[info.offset : info.offset + info.nbytes]

    def close(self) -> None:
        """Let go of the maps; each is unmapped when the last array or buffer made of it is gone."""
        self.shards = []
        self.metadata.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
