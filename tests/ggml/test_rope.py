"""Rotary positions: the first n_rot of a head's dimensions turn, by HF's definition, and nothing else changes."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from tests.kit import nmse

HEAD_DIM, N_ROT, BASE = 256, 64, 1e7
POSITIONS = [0, 1, 700, 2355, 100000]


def rotate(x, positions, n_rot, base, offset=None, base_dim=None):
    """Apply rotary embedding to the first n_rot of x [tokens, heads, head_dim] as transformers does: halves paired n_rot / 2 apart."""
    offset = n_rot // 2 if offset is None else offset
    frequency = base ** -(np.arange(0, n_rot, 2) / (base_dim or n_rot))
    angle = np.asarray(positions, np.float64)[:, None, None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    out = x.copy()
    first, second = x[..., : n_rot // 2], x[..., offset : offset + n_rot // 2]
    out[..., : n_rot // 2] = first * cos - second * sin
    out[..., offset : offset + n_rot // 2] = second * cos + first * sin
    return out


@pytest.fixture
def rotated(bench, rng):
    x = rng.standard_normal((len(POSITIONS), 3, HEAD_DIM)).astype(np.float32)
    a, positions = bench.tensor(x), bench.tensor(np.array(POSITIONS, np.int32))
    node = bench.g.rope_ext(a, positions, None, N_ROT, ggml.ROPE_NEOX, 262144, BASE, 1.0, 0.0, 1.0, 32.0, 1.0)
    return x, bench.run(node)


def test_equals_the_definition_at_every_distance(rotated):
    x, got = rotated
    want = rotate(x.astype(np.float64), POSITIONS, N_ROT, BASE)
    for i, position in enumerate(POSITIONS):
        # ggml multiplies float32 angles up by the frequency ratio: far out an angle of 1e5 has 7 digits
        assert nmse(got[i], want[i]) <= (1e-7 if position < 10000 else 1e-6), f"position {position}"


def test_the_rest_of_the_head_is_untouched(rotated):
    x, got = rotated
    assert np.array_equal(got[..., N_ROT:], x[..., N_ROT:])
    assert np.array_equal(got[0], x[0]), "position 0 turns nothing"


@pytest.mark.parametrize(
    "fault",
    [
        dict(base_dim=HEAD_DIM),  # frequencies from the head's width
        dict(offset=HEAD_DIM // 2),  # pairs half a head apart
    ],
)
def test_the_wrong_conventions_part_with_distance(rotated, fault):
    x, got = rotated
    wrong = rotate(x.astype(np.float64), POSITIONS, N_ROT, BASE, **fault)
    assert nmse(got[0], wrong[0]) <= 1e-7, "equal at position 0, which is why short tests pass"
    assert all(nmse(got[i], wrong[i]) > 1e-3 for i in range(1, len(POSITIONS)))


def test_four_positions_a_token(bench, rng):
    """All four equal is the plain rotation; a second axis turns only its own section."""
    x = rng.standard_normal((3, 2, 64)).astype(np.float32)
    sections = [16, 8, 8, 0]

    def run(time, height):
        positions = np.concatenate([time, height, time, np.zeros(3)]).astype(np.int32)
        return bench.g.rope_multi(bench.tensor(x), bench.tensor(positions), None, 64, sections, ggml.ROPE_MROPE, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)

    here, there = np.array([1, 5, 9]), np.array([2, 2, 2])
    plain, bent = bench.run(run(here, here), run(here, there))
    assert nmse(plain, rotate(x.astype(np.float64), here, 64, 1e4)) <= 1e-7
    second = np.zeros(64, bool)
    second[[*range(16, 24), *range(48, 56)]] = True
    assert np.array_equal(plain[..., ~second], bent[..., ~second])
    assert nmse(plain[..., second], bent[..., second]) > 1e-5


def test_yarn_scales_low_frequencies_only(bench, rng):
    x = rng.standard_normal((2, 1, 64)).astype(np.float32)
    a, positions = bench.tensor(x), bench.tensor(np.array([3, 50], np.int32))
    plain = bench.g.rope_ext(a, positions, None, 64, ggml.ROPE_NEOX, 4096, 1e6, 1.0, 0.0, 1.0, 32.0, 1.0)
    yarn = bench.g.rope_ext(a, positions, None, 64, ggml.ROPE_NEOX, 4096, 1e6, 0.25, 1.0, 1.0, 32.0, 1.0)
    plain, yarn = bench.run(plain, yarn)
    magnitude = 1 + 0.1 * np.log(4)
    assert nmse(yarn[..., 0], plain[..., 0] * magnitude) <= 1e-7
    assert nmse(yarn[1, :, 8:32], plain[1, :, 8:32] * magnitude) > 1e-3
