"""How many tokens to draft next, from what drafts gave and took so far (level 9). Knows numbers only, no session and no model."""

from collections import deque

# rounds each length is tried before one is preferred, and how often another is tried afterwards
N_SAMPLES, PROBE_EVERY = 3, 64
# how much of its weight an acceptance keeps each time its position is tried again
MEMORY = 0.99


class Planner:
    """Choose how many tokens to draft: `n_max`, or with `auto` what measured acceptance and costs say is fastest, also 0.

    Single steps are taken now and then in either case, because what drafting gives is measured against them.
    """

    def __init__(self, n_max: int, *, auto: bool):
        self.lengths = tuple(range(n_max + 1)) if auto else (n_max, 0)
        self.auto = auto
        self._n_rounds = 0
        self._n_tried = dict.fromkeys(self.lengths, 0)
        self._seconds = {n: deque(maxlen=32) for n in self.lengths}
        # per position of a draft: how often the one before was accepted, and how often it was too
        self._reached, self._accepted = [0.0] * n_max, [0.0] * n_max

    def next(self) -> int:
        """Return the length of the next draft; with a fixed length no clock has a say, so that one seed gives one text."""
        self._n_rounds += 1
        n = self._explored() if self.auto else self.lengths[self._n_rounds in (2, 4, 6) or self._n_rounds % PROBE_EVERY == 0]
        self._n_tried[n] += 1
        return n

    def _explored(self) -> int:
        # a length that is never timed, because each try builds a graph or is cut short, is not tried forever
        untimed = [n for n in self.lengths if len(self._seconds[n]) < N_SAMPLES and self._n_tried[n] < 3 * N_SAMPLES]
        if untimed:
            return min(untimed, key=self._n_tried.get)
        best = self.best()
        if self._n_rounds % PROBE_EVERY:
            return best
        others = [n for n in self.lengths if n != best]
        return others[self._n_rounds // PROBE_EVERY % len(others)]

    def note(self, n: int, n_accepted: int, seconds: float | None) -> None:
        """Learn from a round of length `n`; None for a time that says nothing."""
        for i in range(min(n, n_accepted + 1)):
            self._reached[i] = MEMORY * self._reached[i] + 1
            self._accepted[i] = MEMORY * self._accepted[i] + (i < n_accepted)
        if seconds is not None and n in self._seconds:
            self._seconds[n].append(seconds)

    def best(self) -> int:
        """Return the length with the highest rate."""
        timed = [n for n in self.lengths if self._seconds[n]]
        return max(timed, key=lambda n: self.n_expected(n) / self.cost(n)) if self.auto and timed else self.lengths[0]

    def n_expected(self, n: int) -> float:
        """Return how many tokens a round of length `n` is expected to give."""
        total, chance = 1.0, 1.0
        for reached, accepted in zip(self._reached[:n], self._accepted[:n]):
            chance *= (accepted + 1) / (reached + 2)
            total += chance
        return total

    def cost(self, n: int) -> float | None:
        """Return the seconds a round of length `n` takes when nothing else runs, None before it was timed.

        What else runs meets long rounds more often than short ones, so neither mean nor median would compare them.
        """
        return min(self._seconds[n]) if self._seconds.get(n) else None
