"""Where things are printed: results on stdout, everything else on stderr (level 12)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import OptionError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def note(text: str = "") -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def complain(sentence: str) -> None:
    """Print an error as one line on stderr."""
    note("error: " + " ".join(sentence.split()))


def emit(text: str) -> None:
    """Print a piece of the result at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def emit_json(document: object) -> None:
    """Print one document as one line of stdout."""
    emit(json.dumps(document, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it. Raises OptionError."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def size(nbytes: int) -> str:
    """Write a number of bytes in the unit that fits."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {UNITS[unit]}" if unit else f"{nbytes} B"


def count(n: int) -> str:
    """Write a number of parameters as llama.cpp does."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M" if n >= 1e6 else f"{n / 1e3:.2f} K"


def plural(n: int, noun: str) -> str:
    """Write a count of things."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def placement(weights) -> str:
    """Say how much of the weights lies where: in the mapped file, in a copy, in the layout of the CPU's own kernels."""
    words = {"mapped": "mapped", "copied": "copied", "repacked": "rewritten for the CPU's own kernels"}
    parts = [f"{size(weights.planned[how])} {word}" for how, word in words.items() if weights.planned.get(how)]
    return ", ".join(parts) or "no weights"


def table(rows: Iterable[Sequence[object]], *, right: Sequence[int] = (), indent: str = "") -> Iterator[str]:
    """Yield one aligned line per row; columns whose index is in `right` end flush."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        padded = (cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        yield (indent + "  ".join(padded)).rstrip()


@contextmanager
def waiting(for_what: str):
    """Show a word on stderr while that is a terminal, and take it away at the end."""
    on_terminal = sys.stderr.isatty()
    if on_terminal:
        print(for_what, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int):
    """Show a bar on stderr while that is a terminal; yields a function that advances it by one."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
