"""Hand a run to a process of its own (level 11): two libggml in one would meet each other's symbols."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from ..errors import BackendError
from .one_op import OneOp
from .recording import Recording
from .sides import SESSION, Run

# the exit status of a worker that says why on the last line of stderr
REFUSED = 3
LOOK, RECORD, EXTRACT = "look", "record", "extract"
Result = TypeVar("Result")


def look_apart(*sides: Run | Recording) -> None:
    """Open every libggml that sessions among `sides` name, each in a child process, and look up their devices; nothing is computed.

    Raises BackendError for one that is not there, with what the child said.
    """
    devices: dict[str | None, list[str]] = {}
    for side in sides:
        if isinstance(side, Run) and side.kind == SESSION:
            devices.setdefault(side.ggml, []).append(side.device)
    for library, names in devices.items():
        _apart(Run(tokens=(), ggml=library, device=",".join(dict.fromkeys(names))), LOOK, (), lambda out: None)


def record_apart(run: Run) -> Recording:
    """Run one side in a child process → its recording. Raises BackendError with what the child said when it failed."""
    return _apart(run, RECORD, (), Recording.load)


def extract_apart(run: Run, name: str, occurrence: int, ubatch: int) -> OneOp:
    """Call `extract` in a child process → the op. Raises BackendError with what the child said when it failed."""
    return _apart(run, EXTRACT, (name, occurrence, ubatch), OneOp.load)


def _apart(run: Run, task: str, node: Sequence, load: Callable[[Path], Result]) -> Result:
    with tempfile.TemporaryDirectory(prefix="qgraph-parity-") as folder:
        job, out = Path(folder, "run.json"), Path(folder, "out.safetensors")
        job.write_text(json.dumps({"task": task, "run": asdict(run), "node": node}), encoding="utf-8")
        # llama.cpp rotates quantised caches, we do not
        env = {**os.environ, "LLAMA_ATTN_ROT_DISABLE": "1"}
        command = [sys.executable, "-m", f"{__package__}.worker", str(job), str(out)]
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        said = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode == REFUSED:
            raise BackendError(said.splitlines()[-1])
        if done.returncode:
            how = _ending(done.returncode)
            raise BackendError(f"the process that ran {run.kind} on {run.device} ended with {how}: {said[-2000:] or 'without a word'}")
        return load(out)


def _ending(status: int) -> str:
    """Say how a process ended: 3 → "status 3", -11 → "signal SIGSEGV"."""
    return f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
