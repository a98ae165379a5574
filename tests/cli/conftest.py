"""The command line in this process: exact output, exit code, and any exception that is no one's fault but ours."""

import os

import pytest
from click.testing import CliRunner

from qwen3next_ggml.cli import cli


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No option of ours is set from outside; one thread, because tests run beside each other."""
    for name in [name for name in os.environ if name.startswith(("LLAMA_ARG_", "QGRAPH_")) and name != "QGRAPH_GGML"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QGRAPH_THREADS", "1")


@pytest.fixture
def qgraph():
    """Run a command; returns click's result with `exit_code`, `stdout` and `stderr`. Bugs raise."""

    def run(*args, stdin="", env=None):
        return CliRunner().invoke(cli, list(map(str, args)), input=stdin, env=env, catch_exceptions=False)

    return run
