"""Named arrays in one file that is whole or not there at all (level 2). Knows no sessions and no models.

The container is safetensors; its header begins with a checksum over everything else, so that a byte that changed anywhere is
noticed. safetensors' own functions copy each array first, and were measured too slow with a checksum on top.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from secrets import token_hex

import numpy as np

from .errors import StateError

DTYPES = {"I64": np.int64, "F32": np.float32, "I32": np.int32, "U32": np.uint32, "F16": np.float16, "U8": np.uint8}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
# the checksum comes first in the header, so it lies at the same place in every file
HEAD = b'{"__metadata__":{"crc32":"'
CRC = slice(8 + len(HEAD), 8 + len(HEAD) + 8)


@dataclass(frozen=True)
class Lazy:
    """An array that is read when its turn to be written has come, so that few are held at a time."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


def write_arrays(path: str | os.PathLike, about: Mapping[str, str], arrays: Mapping[str, np.ndarray | Lazy]) -> int:
    """Write `arrays` and the strings `about` them; returns the size of the file in bytes.

    All goes to a new file beside `path` that is synced and renamed: at any moment `path` is the old file or the new one.
    Raises StateError when the system refuses.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{token_hex(4)}.part")
    # wide elements first: then all are aligned without gaps
    names = sorted(arrays, key=lambda name: (-np.dtype(arrays[name].dtype).itemsize, name))
    header = _header(about, {name: arrays[name] for name in names})
    size = len(header) + sum(arrays[name].nbytes for name in names)
    try:
        with open(part, "xb", buffering=1 << 20) as file:
            # a full disk is noticed before anything is read, and the writing is faster
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
            crc = zlib.crc32(header)
            for name in names:
                raw = _raw(name, arrays[name])
                crc = zlib.crc32(raw, crc)
                file.write(raw)
            file.seek(CRC.start)
            file.write(b"%08x" % crc)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise StateError(f"{path} could not be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return size


def _header(about: Mapping[str, str], arrays: Mapping[str, np.ndarray | Lazy]) -> bytes:
    entries, end = {"__metadata__": {"crc32": "00000000", **about}}, 0
    for name, x in arrays.items():
        entries[name] = {"dtype": NAMES[np.dtype(x.dtype)], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(name: str, x: np.ndarray | Lazy) -> memoryview:
    values = x.read() if isinstance(x, Lazy) else x
    if (values.dtype, values.shape) != (x.dtype, x.shape):
        raise ValueError(f"{name} was to be {x.dtype} {x.shape}, read {values.dtype} {values.shape}")
    return memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _sync_folder(folder: Path) -> None:
    """Make a rename last; where folders cannot be opened there is nothing to do."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_arrays(path: str | os.PathLike, *, what: str = "session file") -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the strings and the arrays of a file, as read-only views of its map.

    Raises StateError for a file that is no `what`, was cut short, or has a byte that changed.
    """
    data = _map(path, what)
    if data[8 : CRC.start] != HEAD or len(data) < CRC.stop:
        raise StateError(f"{path} is not a {what}: it starts with {data[: CRC.start][:16]!r}")
    n_header = 8 + int.from_bytes(data[:8], "little")
    if n_header > len(data):
        raise StateError(f"{path} was cut short: its header ends at byte {n_header}, the file at {len(data)}")
    entries = _parsed(path, data[8:n_header])
    about = entries.pop("__metadata__")
    size = n_header + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size > len(data):
        raise StateError(f"{path} was cut short: it has {len(data)} of {size} bytes")
    with memoryview(data) as view:
        crc = zlib.crc32(view[CRC.stop :], zlib.crc32(b"0" * 8, zlib.crc32(view[: CRC.start])))
    if about.pop("crc32") != f"{crc:08x}" or size < len(data):
        raise StateError(f"{path} is damaged: its bytes do not give the checksum they were written with")
    return about, {name: _array(path, data, n_header, name, entry) for name, entry in entries.items()}


def _array(path: str | os.PathLike, data: mmap.mmap, start: int, name: str, entry: dict) -> np.ndarray:
    dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
    if dtype is None:
        raise StateError(f"{path}: array {name} is of type {entry['dtype']}, expected one of {', '.join(DTYPES)}")
    return np.frombuffer(data, dtype, prod(shape), start + entry["data_offsets"][0]).reshape(shape)


def _map(path: str | os.PathLike, what: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise StateError(f"{path}: not a regular file")
            if not info.st_size:
                raise StateError(f"{path} is not a {what}: it is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from None


def _parsed(path: str | os.PathLike, text: bytes) -> dict:
    try:
        entries = json.loads(text)
        spans = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        sound = all(0 <= begin <= end for begin, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError):
        sound = False
    if not sound:
        raise StateError(f"{path} is damaged: its header cannot be read")
    return entries
