"""Fixtures of the whole suite. One libggml per process: $QGRAPH_GGML names it (`make test` runs the suite once over each)."""

import os
import pathlib
import signal

import hypothesis
import pytest

from tests.kit import Toys

ROOT = pathlib.Path(__file__).parents[1]

# the graphs of the tests are tiny: a second thread would mostly wait for the first, and the suite runs one process per core instead.
# Read by libgomp when it is loaded, so it comes before anything opens a libggml; what tests threads lifts it in a process of its own
os.environ.setdefault("OMP_THREAD_LIMIT", "1")

# needs a second device, and has a run of its own over a libggml that brings one
collect_ignore = [] if "vulkan" in os.environ.get("QGRAPH_GGML", "") else ["vulkan"]

# a shell's background job ignores Ctrl-C, and so would every process the tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def bard():
    """Path of the embedded model."""
    return ROOT / "qwen3next_ggml" / "data" / "bard.gguf"


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """Random model files, each written on first use: `toys.t0`, `toys.mtp`, `toys.legacy`, `toys.file(type="q8_0")`, …"""
    return Toys(tmp_path_factory.mktemp("toys"))
