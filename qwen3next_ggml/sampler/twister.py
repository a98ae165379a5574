"""Random numbers as C++ draws them (level 10)."""

import math

import numpy as np


class Twister:
    """C++'s std::mt19937 and its uniform distributions over [0, 1), so that draws equal llama.cpp's."""

    def __init__(self, seed: int):
        self._bits = np.random.MT19937()
        self._bits.state = np.random.RandomState(seed).get_state(legacy=False)

    def double(self) -> float:
        low, high = self._bits.random_raw(2).tolist()
        return min((float(low) + float(high) * 2.0**32) / 2.0**64, math.nextafter(1, 0))

    def single(self) -> float:
        return min(float(np.float32(self._bits.random_raw()) / np.float32(2**32)), 1 - 2**-24)

    @property
    def state(self) -> np.ndarray:
        """Where in its numbers it is: 624 words and the index of the next one, uint32 [625]; can be set."""
        state = self._bits.state["state"]
        return np.array([*state["key"], state["pos"]], np.uint32)

    @state.setter
    def state(self, words: np.ndarray) -> None:
        self._bits.state = {"bit_generator": "MT19937", "state": {"key": words[:-1], "pos": int(words[-1])}}
