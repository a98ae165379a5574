"""Decode batches: cut them into ubatches, run each, note what came of it (level 7).

Knows memory, graphs and history of one session; knows nothing of going back and of text.
"""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite

import numpy as np

from .batch import UBatch, check_tokens, split_equal
from .errors import NonFinite, OptionError
from .executor import Built
from .graph.inputs import Sizes
from .graph.key import GraphKey
from .graph.options import GraphOptions
from .graph_cache import GraphCache
from .memory import HybridMemory, Plan

Captured = dict[tuple[str, int], tuple[str, tuple[int, ...], np.ndarray]]


class Decoder:
    """Take tokens into the sequences of one session, at most `n_ubatch` at once and `max_seq_tokens` of each, and keep a checkpoint after
    `every` so many of them.
    """

    def __init__(
        self, hparams, options: GraphOptions, graphs: GraphCache, memory: HybridMemory, history, probes, one_token, checkpoints,
        drafter, *, n_ubatch: int, max_seq_tokens: int, every: int,
    ):  # fmt: skip
        self.n_vocab, self.n_embd, self.options = hparams.n_vocab, hparams.n_embd, options
        self.graphs, self.memory, self.history, self.probes = graphs, memory, history, probes
        self.one_token, self.checkpoints, self.drafter = one_token, checkpoints, drafter
        self.n_ubatch, self.max_seq_tokens, self.every = n_ubatch, max_seq_tokens, every

    # one more token of one sequence

    def is_ordinary(self, token: int, seq: int) -> bool:
        """Say whether a token can take the short way: no draft follows and no checkpoint is due after it."""
        return (
            type(token) is int and 0 <= token < self.n_vocab and self.one_token.is_ordinary(seq) and self.drafter is None
            and not (self.every and (self.memory.n_past[seq] + 1) % self.every == 0)
        )  # fmt: skip

    def one(self, token: int, seq: int, top: int = 0) -> list[np.ndarray]:
        """Append an ordinary token → logits [1, n_vocab], or ids [top] and logits [top] of the largest."""
        self.one_token.prepare(token, seq, top)
        self.history.supersede((seq,))
        try:
            outs = self.one_token.compute()
        except BaseException:
            ubatch, plan = self._planned(token, seq)
            self.memory.apply(ubatch, plan, failed=ubatch.seqs)
            raise
        if not isfinite(outs[-1].item(0)):
            ubatch, plan = self._planned(token, seq)
            failed = self._failed(ubatch, outs[-1].reshape(1, -1))
            self.memory.apply(ubatch, plan, failed)
            _refuse(failed)
        self.one_token.keep(token, seq)
        return outs

    def _planned(self, token: int, seq: int) -> tuple[UBatch, Plan]:
        """Return what the general way would run for one more token of `seq`."""
        past = {seq: self.memory.n_past[seq]}
        [ubatch] = split_equal({seq: np.array([token], np.int32)}, past, want="last", n_ubatch=1)
        return ubatch, self.memory.plan(ubatch)

    # any batch

    def batch(
        self, batch: Mapping[int, Sequence[int]], logits: str, captures: tuple[str, ...] = ()
    ) -> tuple[dict[int, np.ndarray], list[Captured]]:
        """Append tokens to several sequences → sequence → logits [n_out, n_vocab], and what was captured in each ubatch."""
        tokens = {seq: check_tokens(ids, self.n_vocab, seq) for seq, ids in batch.items()}
        if not tokens:
            raise OptionError("nothing to decode: the batch is empty")
        self.memory.check({seq: len(ids) for seq, ids in tokens.items()})
        past = dict(enumerate(self.memory.n_past))
        rows: dict[int, list[np.ndarray]] = {seq: [] for seq in tokens}
        captured = []
        # several sequences reach their checkpoints at different tokens, so they are cut there instead of marked
        cut_every = self.every if len(tokens) > 1 else 0
        for ubatch in split_equal(
            tokens, past, want=logits, n_ubatch=self.n_ubatch, max_seq_tokens=self.max_seq_tokens, cut_every=cut_every
        ):
            out, kept = self._run(ubatch, captures)
            captured += [kept] if captures else []
            for seq, i, n in ubatch.outputs:
                rows[seq].append(out[i : i + n])
        empty = np.empty((0, self.n_vocab), np.float32)
        return {seq: r[0] if len(r) == 1 else np.concatenate(r) if r else empty for seq, r in rows.items()}, captured

    def _run(self, ubatch: UBatch, captures: tuple[str, ...]) -> tuple[np.ndarray | None, Captured]:
        marks = self._marks(ubatch)
        plan = self.memory.plan(ubatch, marks)
        sizes = Sizes(ubatch.n_seq_tokens, ubatch.n_seqs, len(ubatch.out_rows), plan.n_kv, plan.rs_head, plan.keep,
                      hidden=self.drafter is not None)  # fmt: skip
        built = self.graphs.get(self.probes.key(GraphKey(sizes, self.options, captures)))
        values = {**built.constants, "inp_tokens": ubatch.tokens, "inp_pos": ubatch.pos, "out_ids": ubatch.out_rows, **plan.inputs}
        out = None if built.logits is None else np.empty((len(ubatch.out_rows), self.n_vocab), np.float32)
        hidden = None if built.hidden is None else np.empty((ubatch.n_tokens, self.n_embd), np.float32)
        self.history.supersede(ubatch.seqs)
        try:
            self.graphs.executor.run(built, built.arrange(values), [x for x in (out, hidden) if x is not None])
        except BaseException:
            self.memory.apply(ubatch, plan, failed=ubatch.seqs)
            raise
        kept = built.read_kept()
        self.probes.note(kept)
        failed = self._failed(ubatch, out)
        self.memory.apply(ubatch, plan, failed)
        self._note(ubatch, built, hidden, failed)
        if self.every:
            self._take_due(ubatch, marks, failed)
        _refuse(failed)
        if self.drafter:
            self.drafter.follow(ubatch.seqs)
        return out, {at: (node.op, node.ne, kept[at]) for at, (node, _) in built.kept.items()} if captures else {}

    def _failed(self, ubatch: UBatch, out: np.ndarray | None) -> dict[int, Sequence[int]]:
        """Return the sequences whose logits are not finite, and the layers whose state is not."""
        # one NaN in the last hidden state makes every logit of its row NaN: one of them tells
        sick = [seq for seq, i, n in ubatch.outputs if not all(map(isfinite, out[i : i + n, 0].tolist()))]
        return {seq: self.memory.recurrent.non_finite(seq, self.memory.n_past[seq] + ubatch.n_seq_tokens) for seq in sick}

    def _note(self, ubatch: UBatch, built: Built, hidden: np.ndarray | None, failed: Collection[int]) -> None:
        """Note the tokens and hidden of the sequences that did not fail, and where their last logits are."""
        n_tokens = ubatch.n_seq_tokens
        for i, (seq, ids) in enumerate(zip(ubatch.seqs, ubatch.tokens.reshape(ubatch.n_seqs, -1).tolist())):
            if seq not in failed:
                self.history.extend(seq, ids, None if hidden is None else hidden[i * n_tokens : (i + 1) * n_tokens])
        self.history.leave({seq: i + n - 1 for seq, i, n in ubatch.outputs if seq not in failed}, built.row)
        if not self.graphs.executor.keeps_outputs:
            self.history.settle()

    # checkpoints

    def _marks(self, ubatch: UBatch) -> tuple[int, ...]:
        """Return the token counts inside this ubatch at which a checkpoint is due; its end needs no mark."""
        if not self.every or ubatch.n_seqs > 1:
            return ()
        first = self.every - self.memory.n_past[ubatch.seqs[0]] % self.every
        return tuple(range(first, ubatch.n_seq_tokens, self.every))

    def _take_due(self, ubatch: UBatch, marks: Sequence[int], failed: Collection[int]) -> None:
        """Take the checkpoints due inside a ubatch, whose states lie in staging slots, and at its end."""
        n_tokens = ubatch.n_seq_tokens
        for seq in (seq for seq in ubatch.seqs if seq not in failed):
            n_past = self.memory.n_past[seq]
            for mark in marks:
                slot = self.memory.recurrent.slot_after(seq, n_past - n_tokens, mark, n_tokens, marks)
                self.checkpoints.add([seq], n_past - n_tokens + mark, self.memory.recurrent.snapshot(slot))
            if n_past % self.every == 0:
                self.checkpoint(seq)

    def checkpoint(self, seq: int) -> bool:
        """Keep a copy of where `seq` is now; False when the budget has no room for one."""
        return self.checkpoints.add([seq], self.memory.n_past[seq], self.memory.snapshot(seq), self.history[seq].logits)


def _refuse(failed: Mapping[int, Sequence[int]]) -> None:
    # attention spreads NaN to every sequence of a ubatch; the one with a sick state brought it in
    for seq, layers in sorted(failed.items(), key=lambda item: not item[1]):
        where = f"the state of layer {layers[0]}" if layers else "attention or the head"
        raise NonFinite(f"sequence {seq}: the logits are not finite; first seen in {where}")
