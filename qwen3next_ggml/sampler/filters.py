"""The steps of the chain as pure functions on tokens in play (level 10)."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Candidates(NamedTuple):
    """Tokens still in play: ids int [n] and logits float32 [n], in the order llama.cpp would have them.

    ordered: known to be by descending logit, equal logits by ascending id.
    """

    ids: np.ndarray
    logits: np.ndarray
    ordered: bool = False

    @classmethod
    def of(cls, logits: np.ndarray) -> "Candidates":
        """Return the whole vocabulary, logits [n_vocab]."""
        return cls(_all_ids(len(logits)), np.asarray(logits, np.float32))

    def take(self, which) -> "Candidates":
        """Return the candidates at these positions, in this order."""
        return self._replace(ids=self.ids[which], logits=self.logits[which])

    def by_logit(self) -> "Candidates":
        return self if self.ordered else self.take(np.lexsort((self.ids, -self.logits)))._replace(ordered=True)

    def weights(self) -> np.ndarray:
        """Return exp(logit - highest logit), float32 [n]: probabilities up to their sum."""
        return np.exp(self.logits - self.logits.max())

    def probabilities(self) -> np.ndarray:
        """Return the softmax, float64 [n]."""
        weights = self.weights()
        return weights / weights.sum(dtype=np.float64)


class Proposal(NamedTuple):
    """A token guessed before its logits were known, and the distribution it was drawn from."""

    token: int
    drawn_from: Candidates


@lru_cache(maxsize=4)
def _all_ids(n_vocab: int) -> np.ndarray:
    ids = np.arange(n_vocab)
    ids.flags.writeable = False
    return ids


def top_k(c: Candidates, k: int) -> Candidates:
    """Keep the k highest logits; all of them for k <= 0."""
    if not 0 < k < len(c.ids):
        return c if k <= 0 else c.by_logit()
    if not c.ordered:
        # only what reaches the k-th highest logit is worth sorting
        c = c.take(np.flatnonzero(c.logits >= np.partition(c.logits, -k)[-k])).by_logit()
    return c.take(slice(k))


def top_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Keep the most likely tokens until their probabilities sum to p, at least one; all of them for p >= 1."""
    if p >= 1:
        return c
    total = c.weights().sum(dtype=np.float64)
    n_head = min(256, len(c.ids))
    while True:
        head = top_k(c, n_head)
        sums = np.cumsum(head.weights(), dtype=np.float64) / total
        n_kept = max(int(np.searchsorted(sums, p)) + 1, min_keep)
        if n_kept <= n_head or n_head == len(c.ids):
            return head.take(slice(n_kept))
        n_head = min(8 * n_head, len(c.ids))


def min_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Keep what is at least p times as likely as the most likely token; all of them for p <= 0."""
    if p <= 0:
        return c
    kept = np.flatnonzero(c.logits >= c.logits.max() + np.float32(math.log(p)))
    return c.take(kept) if len(kept) >= min_keep else top_k(c, min_keep)


def typ_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Keep the tokens whose surprise is nearest to the expected one until their probabilities exceed p; all for p >= 1."""
    if p >= 1:
        return c
    c = c.take(np.flatnonzero(c.weights())).by_logit()
    probabilities = c.probabilities()
    surprise = -np.log(probabilities)
    nearest = np.argsort(np.abs(surprise - probabilities @ surprise), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(probabilities[nearest]), p, side="right")) + 1
    return c.take(nearest[:max(n_kept, min_keep)])._replace(ordered=False)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Keep the logits within n standard deviations of the highest one; all of them for n <= 0."""
    if n <= 0 or len(c.ids) <= 1:
        return c
    possible = c.logits[c.logits > -np.inf]
    return c.take(np.flatnonzero(c.logits >= possible.max() - n * possible.std(dtype=np.float64)))


def xtc(c: Candidates, draw: Callable[[], float], probability: float, threshold: float, min_keep: int = 0) -> Candidates:
    """With this probability drop every token that reaches the threshold, but the least likely one of those."""
    if probability <= 0 or threshold > 0.5 or len(c.ids) < 2 or draw() > probability:
        return c
    c = c.by_logit()
    n_dropped = int(np.count_nonzero(c.probabilities() >= threshold)) - 1
    return c.take(slice(n_dropped, None)) if n_dropped > 0 and len(c.ids) - n_dropped >= min_keep else c


def temperature(c: Candidates, temp: float) -> Candidates:
    """Divide the logits by temp; for temp 0 keep the highest alone, the lowest id where several are equal."""
    if temp > 0:
        return c._replace(logits=c.logits / np.float32(temp))
    return c.take(np.flatnonzero(c.logits == c.logits.max())).by_logit().take(slice(1))


def penalties(c: Candidates, counts: Mapping[int, int], repeat: float, freq: float, present: float) -> Candidates:
    """Make tokens seen before (id to count) less likely, as llama.cpp does: scale by repeat, then subtract."""
    at = np.flatnonzero(np.isin(c.ids, list(counts)))
    times = np.array([counts[token] for token in c.ids[at].tolist()], np.float32)
    logits = c.logits.copy()
    repeat, old = np.float32(repeat), logits[at]
    logits[at] = np.where(old <= 0, old * repeat, old / repeat) - (times * np.float32(freq) + np.float32(present))
    return c._replace(logits=logits, ordered=False)


def draw(c: Candidates, weights: np.ndarray, at: float) -> int:
    """Return the token at `at` in [0, 1) of the running sum of weights [n] over the candidates."""
    sums = np.cumsum(weights, dtype=np.float64)
    return int(c.ids[np.searchsorted(sums, sums[-1] * at)])


def verify(c: Candidates, proposal: Proposal, uniform: Callable[[], float]) -> int:
    """Return the proposed token with probability min(1, p/q), else one of what p has more than q: in sum a draw from p.

    p are the probabilities of c, q those the proposal was drawn from (speculative sampling, arXiv:2211.17192).
    """
    p, q = c.probabilities(), proposal.drawn_from
    order = np.argsort(q.ids)
    at = order[np.minimum(np.searchsorted(q.ids, c.ids, sorter=order), len(order) - 1)]
    q_of_c = np.where(q.ids[at] == c.ids, q.probabilities()[at], 0.0)
    here = np.flatnonzero(c.ids == proposal.token)
    if here.size and uniform() * q_of_c[here[0]] < p[here[0]]:
        return proposal.token
    rest = np.maximum(p - q_of_c, 0.0)
    return draw(c, rest if rest.any() else p, uniform())
