"""One file of a set: its bytes mapped, or read into memory of the caller's (level 2). Knows nothing of what is in it."""

from __future__ import annotations

import io
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import GgufError


@dataclass(frozen=True)
class Shard:
    """One mapped file of the set; the map stays valid as long as anything refers to it."""

    path: Path
    map: mmap.mmap
    bytes: np.ndarray  # uint8 view of the whole map, read-only
    inode: tuple[int, int]  # tells the file from another that has taken its name

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Map a file. Raises GgufError when that cannot be done."""
        with _opened(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise GgufError(f"{path}: not a GGUF file: it is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return cls(path, mapped, np.frombuffer(mapped, np.uint8), _inode(file))

    @property
    def address(self) -> int:
        return self.bytes.__array_interface__["data"][0]

    def read_into(self, memories: Iterable[memoryview], offset: int) -> None:
        """Fill one memory after the other with the file's bytes from `offset` on: several times as fast as copying them out of the map.

        Raises GgufError when the file is not the one that was opened any more, or shorter.
        """
        with _opened(self.path) as file:
            if _inode(file) != self.inode:
                raise GgufError(f"{self.path}: was replaced while it was being read")
            file.seek(offset)
            for memory in memories:
                done = 0
                while done < len(memory):
                    n = file.readinto(memory[done:])
                    if not n:
                        raise GgufError(f"{self.path}: became shorter while it was being read")
                    done += n


@contextmanager
def _opened(path: Path) -> Iterator[io.FileIO]:
    """Open a file for the time of a block; what the system says against it becomes a GgufError."""
    try:
        # a pipe or device would block in open()
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise GgufError(f"{path}: not a regular file")
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        # a path with a zero byte in it
        raise GgufError(f"{str(path)!r}: {error}") from None


def _inode(file: io.FileIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
