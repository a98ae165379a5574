"""Fixtures of the whole suite. One libggml per process: $QGRAPH_GGML names it (`make test` runs the suite once over each)."""

import os
import pathlib

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).parents[1]

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def bard():
    """Path of the embedded model."""
    return ROOT / "qwen3next_ggml" / "data" / "bard.gguf"
