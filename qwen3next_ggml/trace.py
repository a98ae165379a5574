"""Record named values of many tokens into a safetensors file (level 10).

What each ubatch gives goes to one raw temporary file per name, beside the target; at the end they are put together and renamed,
so that no more than one ubatch, and then one name, is held at a time. Knows nothing of text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from .array_file import Lazy, read_arrays, write_arrays
from .errors import GraphError, StateError
from .probes import trimmed

FORMAT, VERSION = "qwen3next_ggml trace", "1"
# without a wanted row the head is not computed, and with one row it is computed for that row
OF_THE_HEAD = {"h_nextn", "result_norm", "result_output", "out_ids"}


@dataclass
class _Series:
    """One value on its way to disk, token axis first; `axis` is None where only the last value counts."""

    path: Path
    axis: int | None
    dtype: np.dtype
    each: tuple[int, ...] = ()
    n: int = 0

    def add(self, name: str, value: np.ndarray) -> None:
        if self.axis is not None:
            value = np.moveaxis(value, self.axis, 0)
        each = value.shape if self.axis is None else value.shape[1:]
        if self.axis is not None and self.n and each != self.each:
            raise GraphError(
                f"{name} has shape {list(each)} per token, {list(self.each)} before: it grows with the context; "
                "trace one ubatch of it (-ub), or leave it out"
            )
        self.each, self.n = each, self.n + len(value)
        # opened each time: a large model has more names than a process may have open files
        with open(self.path, "wb" if self.axis is None else "ab") as file:
            file.write(np.ascontiguousarray(value).data)

    def lazy(self) -> Lazy:
        """Return the whole of it with its axes in order, read when its turn to be written has come."""
        stored = self.each if self.axis is None else (self.n, *self.each)
        shape = self.each if self.axis is None else (*self.each[: self.axis], self.n, *self.each[self.axis :])
        return Lazy(self.dtype, trimmed(shape), lambda: self._read(stored).reshape(trimmed(shape)))

    def _read(self, stored: tuple[int, ...]) -> np.ndarray:
        value = np.memmap(self.path, self.dtype, "r", shape=stored)
        return value if self.axis is None else np.moveaxis(value, 0, self.axis)


def write_trace(session, tokens: Sequence[int], path: str | os.PathLike, *patterns: str, seq: int = 0) -> dict[str, tuple[int, ...]]:
    """Decode `tokens` after what `seq` holds and write the values that `patterns` name to `path` → name → shape.

    Arrays have the names and shapes `session.capture` gives them, an earlier value of a repeated name "#n" behind it; "tokens"
    [n_tokens] is there too, and model, patterns, options and token axes (of four dimensions) in the metadata. Raises GraphError for a pattern that names nothing,
    StateError when the file cannot be written, and what `decode` raises; then there is no new file.
    """
    folder = os.path.dirname(os.path.realpath(path))
    tokens = np.asarray(tokens)
    with session.capture(*patterns) as t, _temporary(folder, path) as raw:
        series: dict[tuple[str, int], _Series] = {}
        logits = "all" if OF_THE_HEAD & {name for name, _ in t.axes} else "none"
        for start in range(0, len(tokens), session.n_ubatch):
            session.decode(tokens[start : start + session.n_ubatch], seq=seq, logits=logits)
            for at, values in t.take().items():
                if at not in series:
                    series[at] = _Series(Path(raw, str(len(series))), t.axes.get(at), values[0].dtype)
                for value in values:
                    series[at].add(at[0], value)
        arrays = {_name(at, series): s.lazy() for at, s in series.items()}
        arrays["tokens"] = tokens.astype(np.int32)
        axes = {_name(at, series): s.axis for at, s in series.items()}
        write_arrays(path, _about(session, patterns, len(tokens), axes), arrays)
    return {name: array.shape for name, array in arrays.items()}


def read_trace(path: str | os.PathLike) -> tuple[dict, dict[str, np.ndarray]]:
    """Return what a trace says of itself and its arrays by name, views of the mapped file. Raises StateError."""
    about, arrays = read_arrays(path, what="trace")
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise StateError(f"{path} is not a trace: its format is {about.get('format')!r} {about.get('version')}, expected {FORMAT!r} {VERSION}")
    return json.loads(about["trace"]), arrays


def _temporary(folder: str, path: str | os.PathLike) -> TemporaryDirectory:
    try:
        return TemporaryDirectory(prefix=".trace-", dir=folder)
    except OSError as error:
        raise StateError(f"{path} could not be written: {error.strerror}") from None


def _name(at: tuple[str, int], among) -> str:
    name, occurrence = at
    last = max(n for base, n in among if base == name)
    return name if occurrence == last else f"{name}#{occurrence}"


def _about(session, patterns: Sequence[str], n_tokens: int, axes: Mapping[str, int | None]) -> dict[str, str]:
    # whoever computes the same again wants the same ubatches
    model, options = session.model, session.settings | {"n_ubatch": session.n_ubatch}
    about = {
        "model": os.path.basename(model.file.path), "arch": model.file.arch, "fingerprint": model.fingerprint, "n_tokens": n_tokens,
        "capture": list(patterns), "token_axes": axes, "options": {name: x if isinstance(x, (str, int, bool)) else repr(x) for name, x in options.items()},
    }  # fmt: skip
    return {"format": FORMAT, "version": VERSION, "trace": json.dumps(about)}
