"""What a session remembers of each sequence beside its state: tokens, last logits, checkpoints (level 7).

Knows token counts and host arrays; knows no tensors and no graphs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
    """What each of `n_seq_max` sequences holds, by index.

    Logits that still lie where they were computed are fetched when somebody asks for them, or before they are overwritten.
    """

    def __init__(self, n_seq_max: int):
        self._held = [Held() for _ in range(n_seq_max)]
        self._late: dict[int, int] = {}  # sequence → the row its logits are in
        self._fetch: Callable[[int], np.ndarray]

    def __getitem__(self, seq: int) -> Held:
        if self._late:
            self.settle()
        return self._held[seq]

    def settle(self) -> None:
        """Fetch the logits that were left where they were computed."""
        late, self._late = self._late, {}
        for seq, row in late.items():
            self._held[seq].logits = self._fetch(row)

    def supersede(self, seqs: Sequence[int]) -> None:
        """Give up the logits after the last token of `seqs`, whose next tokens' are about to be computed; those of others are fetched."""
        for seq in seqs:
            self._late.pop(seq, None)
            self._held[seq].logits = None
        self.settle()

    def leave(self, rows: dict[int, int], fetch: Callable[[int], np.ndarray]) -> None:
        """Note in which row the logits of each sequence lie; `fetch` returns a row [n_vocab], as long as no other graph has run."""
        self._late, self._fetch = rows, fetch

    def extend(self, seq: int, tokens: list[int], hidden: np.ndarray | None = None) -> None:
        """Append `tokens` to `seq`, and the hidden of each where there are any."""
        held = self._held[seq]
        held.tokens += tokens
        if hidden is not None:
            held.hidden = np.concatenate([held.hidden, hidden]) if held.n_hidden else hidden

    def truncate(self, seq: int, n_past: int, logits: np.ndarray | None = None) -> None:
        """Keep the first `n_past` tokens of `seq`, after the last of which there are these logits; all stays where nothing goes."""
        held = self[seq]
        n_gone = len(held.tokens) - n_past
        if n_gone > 0:
            del held.tokens[n_past:]
            held.logits = logits
            if held.hidden is not None:
                held.hidden = held.hidden[: max(held.n_hidden - n_gone, 0)]
            held.fed = min(held.fed, n_past)

    def fork(self, src: int, dst: int) -> None:
        """Let `dst` hold what `src` holds."""
        self._held[dst] = replace(self[src], tokens=list(self._held[src].tokens))


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Recurrent states after `n_past` tokens that all of `seqs` share, and the logits [n_vocab] after them where there were any."""

    n_past: int
    values: Snapshot
    seqs: set[int]
    logits: np.ndarray | None = None

    @cached_property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.values.values()) + (0 if self.logits is None else self.logits.nbytes)


class Checkpoints:
    """Recurrent states on the host, oldest first, within a budget in bytes; the oldest go first.

    Like a KV cell, one belongs to a set of sequences and goes when nobody is left in it.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.taken: list[Checkpoint] = []

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.taken)

    def add(self, seqs: Iterable[int], n_past: int, values: Snapshot, logits: np.ndarray | None = None) -> bool:
        """Keep `values` as the state of `seqs` after `n_past` tokens; False when even alone they exceed the budget."""
        new = Checkpoint(n_past, values, set(seqs), logits)
        if new.nbytes > self.budget:
            return False
        for seq in new.seqs:
            self._leave(seq, lambda n: n == n_past)
        while self.nbytes + new.nbytes > self.budget:
            del self.taken[0]
        self.taken.append(new)
        return True

    def best(self, seq: int, n_past: int) -> int | None:
        """Return the largest token count up to `n_past` that `seq` has a checkpoint of."""
        return max((n for n in self.of(seq) if n <= n_past), default=None)

    def get(self, seq: int, n_past: int) -> Checkpoint | None:
        """Return the checkpoint of `seq` after `n_past` tokens."""
        return next((c for c in self.taken if c.n_past == n_past and seq in c.seqs), None)

    def of(self, seq: int) -> list[int]:
        """Return the token counts `seq` has checkpoints of, ascending."""
        return sorted(c.n_past for c in self.taken if seq in c.seqs)

    def forget(self, seq: int, beyond: int = -1) -> None:
        """Drop the checkpoints of `seq` after more than `beyond` tokens."""
        self._leave(seq, lambda n: n > beyond)

    def fork(self, src: int, dst: int) -> None:
        """Let `dst` share the checkpoints of `src`."""
        self.forget(dst)
        for c in self.taken:
            if src in c.seqs:
                c.seqs.add(dst)

    def _leave(self, seq: int, which: Callable[[int], bool]) -> None:
        for c in self.taken:
            if which(c.n_past):
                c.seqs.discard(seq)
        self.taken = [c for c in self.taken if c.seqs]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many tokens `a` and `b` share from the start."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
