"""Children: what may end the interpreter, or must be seen from outside, runs in one."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def run_python(code, *args, env=None, timeout=120, flags=()):
    """Run Python source in a fresh interpreter at the repository's root; returns the finished process with text output."""
    return _run([sys.executable, *flags, "-c", code, *map(str, args)], env, timeout)


def run_qgraph(*args, env=None, timeout=120, stdin=""):
    """Run the command line as a user would; returns the finished process with text output."""
    return _run([sys.executable, "-m", "qwen3next_ggml.cli", *map(str, args)], env, timeout, stdin)


def _run(argv, env, timeout, stdin=""):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(argv, cwd=ROOT, env=env, timeout=timeout, input=stdin, capture_output=True, text=True)
