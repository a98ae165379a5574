"""One side of a comparison as a program: `python -m qwen3next_ggml.parity.worker RUN.json OUT.safetensors` (level 11)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..errors import QGraphError
from .apart import REFUSED
from .extract import extract
from .sides import Run, record


def main(job: str, out: str) -> int:
    """Record the run in `job`, or take the op behind one of its nodes, to `out` → the exit status; a refusal is one line on stderr."""
    given = json.loads(Path(job).read_text(encoding="utf-8"))
    run = Run(**{name: tuple(x) if isinstance(x, list) else x for name, x in given["run"].items()})
    try:
        (extract(run, *given["node"]) if given["node"] else record(run)).save(out)
    except QGraphError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
