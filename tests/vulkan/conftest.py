"""A second device: Vulkan0 of a libggml with loadable backends, Mesa's software driver by `make vulkan`.

What one decode costs decides what is here: a token takes the driver a tenth of a second, a new shader up to a minute.
"""

from dataclasses import dataclass

import gguf
import numpy as np
import pytest

import qwen3next_ggml as q
from tests.kit import read_arrays
from tests.kit.gguf_bytes import edit_gguf

DEVICE = "Vulkan0"
N_CTX = 768


@dataclass
class Both:
    """One file loaded on the CPU and on Vulkan0."""

    cpu: q.Model
    vulkan: q.Model

    def run(self, tokens, after=(), **options):
        """Return each device's logits of `tokens` at once, then of `after` one by one: two arrays [n, n_vocab] of each, CPU first."""
        return [decode(model, tokens, after, **options) for model in (self.cpu, self.vulkan)]


def decode(model, tokens, after=(), **options):
    with model.session(n_ctx=N_CTX, graph="plain", **options) as s:
        return s.decode(tokens, logits="all"), np.array([s.decode([t])[0] for t in after])


def tokens(model, n):
    """Return n tokens, for each n the same."""
    return np.random.default_rng(n).integers(0, model.hparams.n_vocab, n).tolist()


def both(path):
    return Both(*(q.load(path, device=device, n_threads=1) for device in ("CPU", DEVICE)))


@pytest.fixture(scope="session")
def t0(toys):
    return both(toys.t0)


@pytest.fixture(scope="session")
def bard_f32(bard, tmp_path_factory):
    """Path of the embedded model with its weights as F32: the same values, and kernels that do not round activations."""
    path = tmp_path_factory.mktemp("bard") / "bard-f32.gguf"
    arrays = read_arrays(bard)
    quantised = [t.name for t in gguf.GGUFReader(bard).tensors if t.tensor_type.name != "F32"]
    edit_gguf(bard, path, replace={name: ("f32", arrays[name]) for name in quantised})
    return path
