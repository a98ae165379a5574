"""How many tokens to draft next, from what drafts gave and took so far (level 9). Knows numbers only, no session and no model."""

from collections import deque

# rounds a length is tried before it is judged, and how often one beside the best is tried again
N_SAMPLES, PROBE_EVERY = 3, 64
# what an acceptance seen keeps of its weight each round, so that a text may change
MEMORY = 0.995


class Planner:
    """Choose how many tokens to draft: `n_max`, or with `auto` what measured acceptance and costs say is fastest, also 0.

    Single steps are taken now and then in either case, because what drafting gives is measured against them. With a fixed
    length no clock has a say, so that one seed gives one text.
    """

    def __init__(self, n_max: int, *, auto: bool):
        self.n_max, self.auto = n_max, auto
        self.lengths = tuple(range(n_max + 1)) if auto else (0, n_max)
        self._n_rounds = 0
        self._n_tried = dict.fromkeys(self.lengths, 0)
        self._seconds = {n: deque(maxlen=32) for n in self.lengths}
        # per position of a draft: how often the one before was accepted, and how often it was too
        self._reached, self._accepted = [0.0] * n_max, [0.0] * n_max

    def next(self) -> int:
        """Return the length of the next draft."""
        self._n_rounds += 1
        if not self.auto:
            return 0 if self._n_rounds in (2, 4, 6, 8) or self._n_rounds % (PROBE_EVERY // 2) == 0 else self.n_max
        n = self._explored()
        self._n_tried[n] += 1
        return n

    def _explored(self) -> int:
        """Return the best length, or one beside it that is not known well enough."""
        best = self.best()
        beside = [n for n in (best, best - 1, best + 1) if 0 <= n <= self.n_max]
        # one that is never timed, because each try builds a graph or is cut short, is not tried forever
        unknown = [n for n in beside if len(self._seconds[n]) < N_SAMPLES and self._n_tried[n] < 3 * N_SAMPLES]
        if unknown:
            return unknown[0]
        return beside[1 + self._n_rounds // PROBE_EVERY % (len(beside) - 1)] if self._n_rounds % PROBE_EVERY == 0 else best

    def note(self, n: int, n_accepted: int, seconds: float | None) -> None:
        """Learn from a round of length `n`; None for a time that says nothing."""
        for i in range(self.n_max):
            self._reached[i] = MEMORY * self._reached[i] + (i < min(n, n_accepted + 1))
            self._accepted[i] = MEMORY * self._accepted[i] + (i < n_accepted)
        if seconds is not None and n in self._seconds:
            self._seconds[n].append(seconds)

    def best(self) -> int:
        """Return the length of those timed that has the highest rate."""
        timed = [n for n in self.lengths if self._seconds[n]]
        return max(timed, key=lambda n: self.n_expected(n) / self.cost(n), default=0)

    def n_expected(self, n: int) -> float:
        """Return how many tokens a round of length `n` is expected to give."""
        total, chance = 1.0, 1.0
        for reached, accepted in zip(self._reached[:n], self._accepted[:n]):
            chance *= (accepted + 1) / (reached + 2)
            total += chance
        return total

    def cost(self, n: int) -> float | None:
        """Return the seconds a round of length `n` takes, None before it was timed.

        The lower quartile of the last ones: lengths are timed unequally often, and what else runs on the machine only adds.
        """
        seconds = sorted(self._seconds.get(n, ()))
        return seconds[(len(seconds) - 1) // 4] if seconds else None
