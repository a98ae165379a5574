"""One side in a process of its own: `python -m qwen3next_ggml.parity.worker RUN.json OUT.safetensors` (level 11)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from ..errors import BackendError, QGraphError
from .recording import Recording
from .sides import Run, record

REFUSED = 3


def record_apart(run: Run) -> Recording:
    """Run one side in a child process → its recording. Raises BackendError with what the child said when it failed."""
    with tempfile.TemporaryDirectory(prefix="qgraph-parity-") as folder:
        job, out = Path(folder, "run.json"), Path(folder, "out.safetensors")
        job.write_text(json.dumps(asdict(run)), encoding="utf-8")
        # llama.cpp rotates quantised caches, we do not
        env = {**os.environ, "LLAMA_ATTN_ROT_DISABLE": "1"}
        done = subprocess.run([sys.executable, "-m", __name__, job, out], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        said = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode == REFUSED:
            raise BackendError(said.splitlines()[-1])
        if done.returncode:
            raise BackendError(f"the process that ran {run.kind} on {run.device} ended with status {done.returncode}: {said[-2000:]}")
        return Recording.load(out)


def main(job: str, out: str) -> int:
    """Record the run in `job` to `out` → the exit status; a refusal is one line on stderr."""
    fields = json.loads(Path(job).read_text(encoding="utf-8"))
    run = Run(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()})
    try:
        record(run).save(out)
    except QGraphError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
