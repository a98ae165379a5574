"""From nothing to the first token: a fresh process loads a file, takes a prompt and chooses a token.

Ours is timed from the moment the process is asked for, Python and imports included; llama.cpp's from before it opens the file, so
that Python around it is not held against it. Run as a program it is that process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.engines import ENGINES, EngineConfig


@dataclass(frozen=True, eq=False)
class Started:
    """One start: seconds to the first token, seconds until the file was ready, MiB at most, and the logits [1, n_vocab]."""

    name: str
    seconds: float
    load_seconds: float
    memory: dict
    logits: np.ndarray


def time_start(side: str, config: EngineConfig, tokens) -> Started:
    """Start an engine in a process of its own and let it choose the token after `tokens`."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"side": side, "config": asdict(config), "tokens": list(tokens), "logits": f"{folder}/logits.npy"}
        command = [sys.executable, "-m", "benchmarks.start"]
        # Linux has one monotonic clock for all processes
        job["asked"] = time.monotonic()
        done = subprocess.run(command, input=json.dumps(job), text=True, stdout=subprocess.PIPE, env=os.environ | config.env)
        if done.returncode:
            raise RuntimeError(f"the start of {side} ended with status {done.returncode}")
        return Started(**json.loads(done.stdout), logits=np.load(job["logits"]))


def main() -> None:
    job = json.load(sys.stdin)
    asked = job["asked"]
    if job["side"] == "llama.cpp":
        import llama_cpp.llama_cpp  # noqa: F401

        asked = time.monotonic()
    began = time.monotonic()
    engine = ENGINES[job["side"]](EngineConfig(**job["config"]))
    ready = time.monotonic()
    logits, _ = engine.decode(job["tokens"])
    logits.argmax()
    seconds = time.monotonic() - asked
    from benchmarks.verbs import memory

    np.save(job["logits"], logits[None])
    print(json.dumps({"name": engine.name, "seconds": seconds, "load_seconds": ready - began, "memory": memory(engine)}))


if __name__ == "__main__":
    main()
