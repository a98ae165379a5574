"""The yardsticks themselves."""

import numpy as np
import pytest

from tests.kit import assert_same_greedy, max_abs, nmse, top2_gap


def test_max_abs():
    inf = float("inf")
    assert max_abs([1.0, -inf], [1.5, -inf]) == 0.5
    assert max_abs([], []) == 0.0
    assert max_abs([1.0], [-inf]) == inf
    assert np.isnan(max_abs([np.nan, 1.0], [np.nan, 1.0]))
    with pytest.raises(AssertionError, match="shapes differ"):
        max_abs([1.0], [[1.0]])


def test_nmse():
    assert nmse([3.0, 0.0], [3.0, 4.0]) == 16 / 25
    assert nmse([0.0], [0.0]) == 0.0 and nmse([1.0], [0.0]) > 1e100
    assert not nmse([np.nan], [1.0]) < 1.0


def test_top2_gap():
    assert top2_gap([[1.0, 5.0, 3.5], [2.0, 2.0, 0.0]]).tolist() == [1.5, 0.0]


def test_near_tie_rule():
    gaps = [1.0, 1e-4, 1.0]
    assert_same_greedy([1, 2, 3], [1, 2, 3], gaps)
    assert_same_greedy([1, 9, 9], [1, 2, 3], gaps)
    with pytest.raises(AssertionError, match="token 2: got 9, want 3"):
        assert_same_greedy([1, 2, 9], [1, 2, 3], gaps)
    with pytest.raises(AssertionError, match="2 tokens against 3"):
        assert_same_greedy([1, 2], [1, 2, 3], gaps)
