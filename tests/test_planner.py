"""The choice of a draft's length, played with costs and chances that are known."""

import numpy as np
import pytest

from qwen3next_ggml.planner import Planner


def rounds(planner, costs, acceptance, n):
    """Play n rounds with fixed costs and chances; returns the lengths chosen."""
    rng, chosen = np.random.default_rng(0), []
    for _ in range(n):
        length = planner.next()
        accepted = next((i for i in range(length) if rng.random() > acceptance[i]), length)
        planner.note(length, accepted, costs[length] * (1 + rng.random() ** 4))
        chosen.append(length)
    return chosen


@pytest.mark.parametrize(
    "costs, acceptance, best",
    [
        ((1.0, 1.3, 1.5, 1.7, 1.9), (0.9, 0.9, 0.9, 0.9), 4),
        ((1.0, 1.3, 2.4, 3.4, 4.4), (0.8, 0.5, 0.3, 0.2), 1),
        ((1.0, 1.2, 1.5, 1.8, 2.1), (0.9, 0.9, 0.1, 0.1), 2),
        ((1.0, 1.9, 2.7, 3.5, 4.3), (0.7, 0.6, 0.5, 0.5), 0),
        ((1.0, 1.3, 1.6, 1.9, 2.2), (0.0, 0.0, 0.0, 0.0), 0),
    ],
)
def test_auto_finds_the_length_that_pays(costs, acceptance, best):
    chosen = rounds(Planner(4, auto=True), costs, acceptance, 1200)
    assert np.mean(np.array(chosen[200:]) == best) > 0.9
    assert set(chosen[200:]) == {0, 1, 2, 3, 4}, "what did not pay is tried again now and then"


def test_auto_notices_a_change():
    planner = Planner(4, auto=True)
    costs = (1.0, 1.3, 1.6, 1.9, 2.2)
    assert rounds(planner, costs, (0.9,) * 4, 300)[-1] == 4
    assert rounds(planner, costs, (0.0,) * 4, 300)[-1] == 0


def test_a_fixed_length_is_kept_but_for_single_steps_to_compare_with():
    chosen = rounds(Planner(2, auto=False), (1.0, 9.0, 9.0), (0.0, 0.0), 400)
    assert set(chosen) == {0, 2} and chosen.count(0) < 20


def test_a_length_that_is_never_timed_is_not_tried_forever():
    planner = Planner(1, auto=True)
    for _ in range(100):
        n = planner.next()
        planner.note(n, 0, None if n else 1.0)
    assert [planner.next() for _ in range(20)].count(0) >= 19
