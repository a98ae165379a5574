"""llama.cpp's file of log-probabilities, written and read (level 11).

"_logits_", then int32 n_ctx, n_vocab, n_chunk and n_chunk · n_ctx tokens, then a row per scored prediction: float32 scale and
lowest log-probability, and a 16-bit step per token (padded to an even number): log p = scale · step + lowest. Little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import OptionError
from .scores import blocks
from .windows import Windows

MAGIC = b"_logits_"
HEAD = struct.Struct("<8s3i")
# tokens this much less likely than the best one (in nats) share the lowest step: a base that was surprised more than that reads back better
RANGE = 16.0
STEPS = 65535
N_PARAMS = 4


def row_width(n_vocab: int) -> int:
    """Return how many 16-bit words a row takes."""
    return N_PARAMS + n_vocab + n_vocab % 2


def pack(logits: np.ndarray) -> np.ndarray:
    """Return logits [n, n_vocab] as rows of the file, uint16 [n, row_width].

    Steps are rounded in float32, which gives the words that llama.cpp writes.
    """
    n, n_vocab = logits.shape
    rows = np.zeros((n, row_width(n_vocab)), "<u2")
    for at in blocks(logits):
        x = logits[at].astype(np.float32)
        top = x.max(-1, keepdims=True)
        low = np.maximum(x.min(-1, keepdims=True), top - np.float32(RANGE))
        log_sum = np.log(np.exp(x - top, dtype=np.float64).sum(-1, keepdims=True)).astype(np.float32)
        scale = (top - low) / np.float32(STEPS)
        per_step = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        rows[at, :N_PARAMS] = np.hstack([scale, low - top - log_sum]).astype("<f4").view("<u2")
        rows[at, N_PARAMS : N_PARAMS + n_vocab] = np.rint((np.maximum(x, low) - low) * per_step)
    return rows


def unpack(rows: np.ndarray, n_vocab: int) -> np.ndarray:
    """Return the log-probabilities of rows uint16 [n, row_width] as float64 [n, n_vocab]."""
    scale, low = np.ascontiguousarray(rows[:, :N_PARAMS]).view("<f4").astype(np.float64).T[..., None]
    return rows[:, N_PARAMS : N_PARAMS + n_vocab] * scale + low


class LogitsWriter:
    """Writes the rows of one window after another; the file is there once the `with` block ends well.

    Raises OptionError when the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike, windows: Windows, n_vocab: int):
        self.path = Path(path)
        self._part = self.path.with_name(f"{self.path.name}.part")
        tokens = windows.tokens[: windows.count * windows.n_ctx].astype("<i4")
        self._head = HEAD.pack(MAGIC, windows.n_ctx, n_vocab, windows.count) + tokens.tobytes()

    def __enter__(self) -> LogitsWriter:
        with _named(self.path):
            self._file = open(self._part, "wb", buffering=0)
        self._write(self._head)
        return self

    def add(self, logits: np.ndarray) -> None:
        """Append the scored logits of a window [n_scored, n_vocab]."""
        self._write(pack(logits).tobytes())

    def _write(self, data: bytes) -> None:
        try:
            with _named(self.path):
                while data := data[self._file.write(data) :]:
                    pass
        except OptionError:
            self._discard()
            raise

    def _discard(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            with _named(self.path):
                os.replace(self._part, self.path)
        self._discard()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None


@dataclass(frozen=True, eq=False)
class LogitsFile:
    """An open file: tokens [n_chunk, n_ctx], and rows [n_chunk, n_scored, row_width] which are mapped, not read."""

    path: Path
    n_vocab: int
    tokens: np.ndarray
    rows: np.ndarray

    @classmethod
    def open(cls, path: str | os.PathLike) -> LogitsFile:
        """Map a file written here or by llama.cpp. Raises OptionError."""
        path = Path(path)
        with _named(path), open(path, "rb") as file:
            head = file.read(HEAD.size)
            size = os.fstat(file.fileno()).st_size
        if not head.startswith(MAGIC):
            raise OptionError(f"{path}: not a file of log-probabilities: it starts with {head[:8]!r}, expected {MAGIC!r}")
        n_ctx, n_vocab, n_chunk = HEAD.unpack(head)[1:] if len(head) == HEAD.size else (0, 0, 0)
        if n_ctx < 3 or n_vocab < 1 or n_chunk < 1:
            raise OptionError(f"{path}: {n_chunk} windows of {n_ctx} tokens over a vocabulary of {n_vocab}: nothing to compare with")
        shape = (n_chunk, n_ctx - 1 - n_ctx // 2, row_width(n_vocab))
        tokens_end = HEAD.size + 4 * n_chunk * n_ctx
        expected = tokens_end + 2 * shape[0] * shape[1] * shape[2]
        if size < expected:
            raise OptionError(f"{path}: file too short: {size} bytes, its header asks for {expected}")
        tokens = np.fromfile(path, "<i4", n_chunk * n_ctx, offset=HEAD.size).reshape(n_chunk, n_ctx)
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise OptionError(f"{path}: holds tokens from {tokens.min()} to {tokens.max()}, its vocabulary has {n_vocab}")
        return cls(path, n_vocab, tokens, np.memmap(path, "<u2", "r", tokens_end, shape))

    def windows(self, *, n_chunks: int = -1, bos: int | None = None) -> Windows:
        """Return the windows the file was made from, `n_chunks` at most. Raises OptionError."""
        tokens = self.tokens.ravel()
        n_chunk, n_ctx = self.tokens.shape
        return Windows(tokens, n_ctx, n_ctx, n_ctx // 2, n_chunk, bos).limited(n_chunks)
