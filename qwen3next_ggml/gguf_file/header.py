"""The header of one GGUF file: magic, version, metadata (level 2).

Every count is compared with the bytes left before anything is allocated, and nothing recurses. gguf-py's reader took
9 s and 540 MiB on 151 936 tokens and as many merges (this walk: 0.1 s), and follows nested arrays by recursion: it is
not used. Does not know tensors.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import GgufError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY = 65535  # bytes, from the GGUF specification
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
BOOL = 7

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


def shown(text: str) -> str:
    """Quote a name from a file for an error message: on one line, not too long."""
    return repr(text if len(text) <= 60 else f"{text[:59]}…")


@dataclass(frozen=True)
class _Array:
    """An array that was walked over but not parsed."""

    kind: int
    n: int
    start: int


class KeyValues(Mapping):
    """Metadata as a mapping; arrays are parsed into lists on first use and kept."""

    def __init__(self, where: str, buf: mmap.mmap, values: dict[str, Any]):
        self._where, self._buf, self._values = where, buf, values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._parse(key, value)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def is_array(self, key: str) -> bool:
        return isinstance(self._values[key], (_Array, list))

    def length(self, key: str) -> int:
        """Count the elements of an array (or characters of a string) without parsing it."""
        value = self._values[key]
        return value.n if isinstance(value, _Array) else len(value)

    def summary(self, key: str, limit: int = 60) -> str:
        """Describe a value on one line: a long array by its length, a long string by its start."""
        if self.is_array(key) and self.length(key) > 16:
            return f"[{self.length(key)} values]"
        text = repr(self[key])
        return text if len(text) <= limit else text[: limit - 1] + "…"

    def close(self) -> None:
        """Let go of the file; arrays that were not read yet cannot be any more."""
        self._buf = None

    def _parse(self, key: str, array: _Array) -> list:
        if self._buf is None:
            raise GgufError(f"{self._where}: the file is closed, {shown(key)} was not read before")
        if array.kind != STRING:
            values = np.frombuffer(self._buf, SCALARS[array.kind], array.n, array.start)
            return (values != 0).tolist() if array.kind == BOOL else values.tolist()
        buf, pos, strings = self._buf, array.start, []
        try:
            for _ in range(array.n):
                begin = pos + 8
                pos = begin + _u64(buf, pos)[0]
                strings.append(buf[begin:pos].decode("utf-8"))
        except UnicodeDecodeError:
            raise GgufError(f"{self._where}: {shown(key)}[{len(strings)}] is not UTF-8: {buf[begin:pos][:40]!r}") from None
        return strings


class Cursor:
    """Walks one mapped file; every step is checked against the bytes left."""

    def __init__(self, where: str, buf: mmap.mmap):
        self.where, self.buf, self.pos, self.size = where, buf, 0, len(buf)

    def skip(self, n: int, what: str) -> int:
        """Move over n bytes and return where they start."""
        start = self.pos
        if n > self.size - start:
            raise GgufError(
                f"{self.where}: file too short: {what} wants {n} bytes at offset {start}, the file has {self.size} bytes"
            )
        self.pos = start + n
        return start

    def room_for(self, n: int, each: int, what: str) -> int:
        """Return a count, once at least `each` bytes a piece are known to be left."""
        if n * each > self.size - self.pos:
            left = self.size - self.pos
            raise GgufError(f"{self.where}: file too short: {n} {what} want at least {n * each} bytes, {left} are left")
        return n

    def u32(self, what: str) -> int:
        return _u32(self.buf, self.skip(4, what))[0]

    def u64(self, what: str) -> int:
        return _u64(self.buf, self.skip(8, what))[0]

    def raw(self, what: str, limit: int | None = None) -> bytes:
        n = self.u64(f"the length of {what}")
        if limit is not None and n > limit:
            raise GgufError(f"{self.where}: {what} is {n} bytes long, at most {limit} are allowed")
        start = self.skip(n, what)
        return self.buf[start : self.pos]

    def name(self, what: str, limit: int) -> str:
        raw = self.raw(what, limit)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"{self.where}: {what} is not UTF-8: {raw[:40]!r}") from None
        if not text or "\0" in text:
            raise GgufError(f"{self.where}: {what} is {'empty' if not text else repr(text[:40])}")
        return text

    def value(self, key: str) -> Any:
        kind = self.u32(f"the type of key {key}")
        if kind == STRING:
            # a broken byte in a title or an architecture name must stay printable, not end the load
            return self.raw(f"the value of key {key}").decode("utf-8", "backslashreplace")
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise GgufError(f"{self.where}: key {key} has value type {kind}, GGUF defines 0 to 12")
        code = SCALARS[kind]
        value = struct.unpack_from(code, self.buf, self.skip(struct.calcsize(code), f"the value of key {key}"))[0]
        if kind == BOOL:
            if value > 1:
                raise GgufError(f"{self.where}: key {key} is a bool of value {value}, expected 0 or 1")
            return bool(value)
        return value

    def array(self, key: str) -> _Array:
        kind = self.u32(f"the element type of key {key}")
        n = self.u64(f"the length of key {key}")
        start = self.pos
        if kind == STRING:
            self.room_for(n, 8, f"strings of key {key}")
            self.pos = self.skip_strings(key, n)
        elif kind in SCALARS:
            self.skip(n * struct.calcsize(SCALARS[kind]), f"the array of key {key}")
            if kind == BOOL and n and np.frombuffer(self.buf, np.uint8, n, start).max() > 1:
                raise GgufError(f"{self.where}: key {key} holds bools that are neither 0 nor 1")
        else:
            what = "arrays, which no GGUF reader accepts" if kind == ARRAY else f"type {kind}, GGUF defines 0 to 12"
            raise GgufError(f"{self.where}: key {key} is an array of {what}")
        return _Array(kind, n, start)

    def skip_strings(self, key: str, n: int) -> int:
        buf, pos, last = self.buf, self.pos, self.size - 8
        for i in range(n):
            if pos > last:
                raise self.string_too_long(key, i, pos + 8)
            pos += 8 + _u64(buf, pos)[0]
        if pos > self.size:
            raise self.string_too_long(key, n - 1, pos)
        return pos

    def string_too_long(self, key: str, i: int, end: int) -> GgufError:
        return GgufError(f"{self.where}: file too short: key {key}[{i}] reaches byte {end}, the file has {self.size} bytes")


def read_header(cursor: Cursor) -> tuple[int, dict[str, Any], int]:
    """Read magic, version and metadata; return the version, the values and the number of tensors that follow."""
    where = cursor.where
    if cursor.size < 4 or cursor.buf[:4] != MAGIC:
        raise GgufError(f"{where}: not a GGUF file: it starts with {cursor.buf[:4]!r}, expected {MAGIC!r}")
    cursor.pos = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        why = " (a big-endian file?)" if version and not version & 0xFFFF else ""
        raise GgufError(f"{where}: GGUF version {version}{why}, supported are {VERSIONS[0]} and {VERSIONS[1]}")
    n_tensors, n_kv = cursor.u64("the tensor count"), cursor.u64("the key count")
    cursor.room_for(n_kv, 14, "keys")  # length, one letter, type, one byte of value
    values: dict[str, Any] = {}
    for i in range(n_kv):
        key = cursor.name(f"key {i}", MAX_KEY)
        if key in values:
            raise GgufError(f"{where}: key {shown(key)} appears twice")
        values[key] = cursor.value(shown(key))
    return version, values, n_tensors
