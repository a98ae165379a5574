"""One side of a comparison as a program: `python -m qwen3next_ggml.parity.worker RUN.json OUT.safetensors` (level 11)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .. import ggml
from ..errors import QGraphError
from .apart import EXTRACT, LOOK, REFUSED
from .extract import extract
from .sides import Run, record


def main(job: str, out: str) -> int:
    """Do the task of `job` → the exit status; a refusal is one line on stderr.

    To `out` goes the recording of a run, or the op behind one of its nodes; of one whose devices are looked up, nothing.
    """
    given = json.loads(Path(job).read_text(encoding="utf-8"))
    run = Run(**{name: tuple(x) if isinstance(x, list) else x for name, x in given["run"].items()})
    try:
        if given["task"] == LOOK:
            _look(run)
        else:
            (extract(run, *given["node"]) if given["task"] == EXTRACT else record(run)).save(out)
    except QGraphError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def _look(run: Run) -> None:
    ggml.provider(run.ggml)
    for name in run.device.split(","):
        ggml.device(name)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
