"""The choice of a draft's length, played with costs and chances that are known."""

import numpy as np
import pytest

from qwen3next_ggml.planner import Planner


def rounds(planner, costs, acceptance, n, *, seed=0):
    """Play n rounds with noisy costs and chances by position; returns the lengths chosen."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(n):
        length = planner.next()
        accepted = next((i for i in range(length) if rng.random() > acceptance[i]), length)
        planner.note(length, accepted, costs[length] * (1 + rng.random() ** 4))
        chosen.append(length)
    return chosen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "costs, acceptance, best",
    [
        ((1.0, 1.2, 1.3, 1.4, 1.5), (0.9, 0.9, 0.9, 0.9), 4),
        ((1.0, 1.3, 2.4, 3.4, 4.4), (0.8, 0.5, 0.3, 0.2), 1),
        ((1.0, 1.2, 1.5, 1.9, 2.3), (0.9, 0.9, 0.1, 0.1), 2),
        ((1.0, 2.1, 2.9, 3.7, 4.5), (0.7, 0.6, 0.5, 0.5), 0),
        ((1.0, 1.4, 1.8, 2.2, 2.6), (0.0, 0.0, 0.0, 0.0), 0),
    ],
)
def test_auto_finds_the_length_that_pays(costs, acceptance, best, seed):
    chosen = rounds(Planner(4, auto=True), costs, acceptance, 1200, seed=seed)
    assert np.mean(np.array(chosen[200:]) == best) > 0.85
    assert len(set(chosen[200:])) > 1, "what did not pay is tried again now and then"


def test_little_is_spent_where_nothing_pays():
    chosen = rounds(Planner(4, auto=True), (1.0, 2.1, 3.5, 4.7, 5.9), (0.7, 0.5, 0.4, 0.3), 2000)
    assert sum(chosen[:20]) <= 6 and np.count_nonzero(chosen) < 50 and max(chosen) == 1


def test_auto_notices_a_change():
    planner = Planner(4, auto=True)
    costs = (1.0, 1.25, 1.45, 1.65, 1.85)
    assert np.median(rounds(planner, costs, (0.9,) * 4, 400)[-100:]) == 4
    assert np.median(rounds(planner, costs, (0.0,) * 4, 400)[-100:]) == 0
    assert np.median(rounds(planner, costs, (0.9,) * 4, 800)[-100:]) == 4


def test_a_fixed_length_is_kept_but_for_single_steps_to_compare_with():
    chosen = rounds(Planner(2, auto=False), (1.0, 9.0, 9.0), (0.0, 0.0), 400)
    assert set(chosen) == {0, 2} and chosen.count(0) == 4 + 400 // 32
    assert chosen == rounds(Planner(2, auto=False), (9.0, 1.0, 1.0), (1.0, 1.0), 400)


def test_a_length_that_is_never_timed_is_not_tried_forever():
    planner = Planner(1, auto=True)
    for _ in range(100):
        n = planner.next()
        planner.note(n, 0, None if n else 1.0)
    assert [planner.next() for _ in range(20)].count(0) >= 19
