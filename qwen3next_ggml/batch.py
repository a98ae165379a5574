"""Cut what a caller hands in into ubatches a graph can run (level 2).

A ubatch holds equally many tokens of each of its sequences, sequence after sequence, because recurrent layers
see it as [n_seq_tokens, n_seqs]. Knows nothing about models, memory or graphs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import OptionError

WANTS = ("last", "all", "none")
N_UBATCH, MAX_UBATCH = 512, 2048
MAX_MASK = 1 << 25
FULL_TILES = 32  # tokens per expert from which tiled kernels gain little by more (docs/log.md)


@dataclass(frozen=True, eq=False)
class UBatch:
    """One graph run: tokens of `n_seqs` sequences, `n_seq_tokens` each, sequence-major.

    `out_rows` are the rows of this ubatch whose logits are wanted, ascending; `out_slots` says, for each of them,
    which sequence and which of its wanted rows it is; `outputs` are (sequence, first wanted row, how many).
    """

    tokens: np.ndarray
    pos: np.ndarray
    seqs: tuple[int, ...]
    n_seq_tokens: int
    out_rows: np.ndarray
    out_slots: tuple[tuple[int, int], ...]

    @property
    def n_seqs(self) -> int:
        return len(self.seqs)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def seq_of_row(self) -> np.ndarray:
        return np.repeat(np.asarray(self.seqs, np.int32), self.n_seq_tokens)

    @cached_property
    def outputs(self) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for row, (seq, _) in enumerate(self.out_slots):
            if found and found[-1][0] == seq:
                found[-1] = (seq, found[-1][1], found[-1][2] + 1)
            else:
                found.append((seq, row, 1))
        return found


def check_tokens(tokens: Sequence[int], n_vocab: int, seq: int) -> np.ndarray:
    """Return `tokens` as int32, or raise OptionError naming the first one outside the vocabulary."""
    if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < n_vocab:
        # a step of many sequences has one such list for each
        return np.array(tokens, np.int32)
    out = np.asarray(tokens)
    if out.ndim != 1 or out.size == 0:
        got = f"a {type(tokens).__name__}" if out.ndim == 0 else f"shape {out.shape}"
        raise OptionError(f"sequence {seq}: expected a non-empty list of token ids, got {got}")
    if out.dtype.kind not in "iu":
        raise OptionError(f"sequence {seq}: token ids must be integers, got {out.dtype}")
    bad = (out < 0) | (out >= n_vocab)
    if bad.any():
        first = bad.argmax()
        raise OptionError(f"sequence {seq}: token {out[first]} at index {first} is outside the vocabulary of {n_vocab}")
    return np.ascontiguousarray(out, np.int32)


def best_ubatch(n_expert: int, n_expert_used: int, n_ctx: int, *, tiled: bool) -> int:
    """Return how many tokens are best computed at once: N_UBATCH, as in llama.cpp, or up to MAX_UBATCH for `tiled` kernels, whose tiles
    of 16 tokens stay half empty where each of many experts gets few of them. A long context leaves it at less: a mask has a number for
    every token and cell.
    """
    n = N_UBATCH
    while tiled and n < MAX_UBATCH and n * n_expert_used < FULL_TILES * n_expert and 2 * n * n_ctx <= MAX_MASK:
        n *= 2
    return n


def split_equal(
    tokens: Mapping[int, np.ndarray], n_past: Mapping[int, int], *, want: str, n_ubatch: int,
    max_seq_tokens: int | None = None, cut_every: int = 0,
) -> list[UBatch]:  # fmt: skip
    """Cut `tokens` (sequence → ids) into ubatches of at most `n_ubatch` tokens.

    Sequences advance side by side until the shortest ends, as llama.cpp's `split_equal` does. `want` is "last",
    "all" or "none"; `max_seq_tokens` caps a sequence's share of one ubatch, and none reaches past a position that is a
    multiple of `cut_every`.
    """
    if want not in WANTS:
        raise OptionError(f"logits must be one of {', '.join(WANTS)}, got {want!r}")
    done = dict.fromkeys(sorted(tokens), 0)
    ubatches = []
    while active := [s for s in done if done[s] < len(tokens[s])][:n_ubatch]:
        n = min(min(len(tokens[s]) - done[s] for s in active), n_ubatch // len(active), max_seq_tokens or n_ubatch)
        if cut_every:
            n = min(n, *(cut_every - (n_past[s] + done[s]) % cut_every for s in active))
        ubatches.append(_take(tokens, n_past, done, active, n, want))
        for s in active:
            done[s] += n
    return ubatches


def _take(tokens, n_past, done, seqs, n, want) -> UBatch:
    rows, slots = [], []
    for i, s in enumerate(seqs):
        start, length = done[s], len(tokens[s])
        if want == "all":
            rows += range(i * n, (i + 1) * n)
            slots += [(s, start + t) for t in range(n)]
        elif want == "last" and start + n == length:
            rows.append((i + 1) * n - 1)
            slots.append((s, 0))
    return UBatch(
        tokens=_joined([tokens[s][done[s] : done[s] + n] for s in seqs]),
        pos=np.add.outer([n_past[s] + done[s] for s in seqs], np.arange(n)).reshape(-1).astype(np.int32),
        seqs=tuple(seqs),
        n_seq_tokens=n,
        out_rows=np.asarray(rows, np.int32),
        out_slots=tuple(slots),
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
