"""What a session remembers of each sequence beside its state: tokens, last logits, checkpoints (level 7).

Knows token counts and host arrays; knows no tensors and no graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

Snapshot = Mapping[tuple[int, str], np.ndarray]


@dataclass
class Held:
    """One sequence: the tokens it holds and the logits [n_vocab] after the last of them, where they were computed.

    Where a NextN head follows: the final-norm `hidden` [n, n_embd] of the last n tokens, and how many tokens it was `fed`.
    """

    tokens: list[int] = field(default_factory=list)
    logits: np.ndarray | None = None
    hidden: np.ndarray | None = None
    fed: int = 0

    @property
    def n_hidden(self) -> int:
        return 0 if self.hidden is None else len(self.hidden)


class History:
    """What each of `n_seq_max` sequences holds, by index."""

    def __init__(self, n_seq_max: int):
        self._held = [Held() for _ in range(n_seq_max)]

    def __getitem__(self, seq: int) -> Held:
        return self._held[seq]

    def extend(self, seq: int, tokens: list[int], logits: np.ndarray | None, hidden: np.ndarray | None = None) -> None:
        """Append `tokens` to `seq`, with the logits after the last one and the hidden of each where there are any."""
        held = self._held[seq]
        held.tokens += tokens
        held.logits = logits
        if hidden is not None:
            held.hidden = np.concatenate([held.hidden, hidden]) if held.n_hidden else hidden

    def truncate(self, seq: int, n_past: int) -> None:
        """Keep the first `n_past` tokens of `seq`; the logits go unless nothing else does."""
        held = self._held[seq]
        n_gone = len(held.tokens) - n_past
        if n_gone > 0:
            del held.tokens[n_past:]
            held.logits = None
            if held.hidden is not None:
                held.hidden = held.hidden[: max(held.n_hidden - n_gone, 0)]
            held.fed = min(held.fed, n_past)

    def fork(self, src: int, dst: int) -> None:
        """Let `dst` hold what `src` holds."""
        self._held[dst] = replace(self._held[src], tokens=list(self._held[src].tokens))


class Checkpoints:
    """Recurrent states on the host by (sequence, token count), within a budget in bytes; the oldest go first."""

    def __init__(self, budget: int):
        self.budget = budget
        self.nbytes = 0
        self._taken: dict[tuple[int, int], Snapshot] = {}

    def add(self, seq: int, n_past: int, values: Snapshot) -> bool:
        """Keep `values` as the state of `seq` after `n_past` tokens; False when even alone they exceed the budget."""
        size = _size(values)
        if size > self.budget:
            return False
        self._drop((seq, n_past))
        while self.nbytes + size > self.budget:
            self._drop(next(iter(self._taken)))
        self._taken[seq, n_past] = values
        self.nbytes += size
        return True

    def best(self, seq: int, n_past: int) -> int | None:
        """Return the largest token count up to `n_past` that `seq` has a checkpoint of."""
        return max((n for s, n in self._taken if s == seq and n <= n_past), default=None)

    def get(self, seq: int, n_past: int) -> Snapshot:
        """Return the states taken of `seq` after `n_past` tokens."""
        return self._taken[seq, n_past]

    def of(self, seq: int) -> list[int]:
        """Return the token counts `seq` has checkpoints of, ascending."""
        return sorted(n for s, n in self._taken if s == seq)

    def forget(self, seq: int, beyond: int = -1) -> None:
        """Drop the checkpoints of `seq` after more than `beyond` tokens."""
        for at in [at for at in self._taken if at[0] == seq and at[1] > beyond]:
            self._drop(at)

    def fork(self, src: int, dst: int) -> None:
        """Give `dst` the checkpoints of `src`, as far as the budget allows."""
        self.forget(dst)
        for n in self.of(src):
            if (src, n) in self._taken:
                self.add(dst, n, self._taken[src, n])

    def _drop(self, at: tuple[int, int]) -> None:
        values = self._taken.pop(at, None)
        self.nbytes -= _size(values) if values else 0


def _size(values: Snapshot) -> int:
    return sum(x.nbytes for x in values.values())


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many tokens `a` and `b` share from the start."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
