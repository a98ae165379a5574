"""Decode tokens and move about in what was decoded (level 8).

A session owns the state of its sequences and its compute buffer; it knows nothing of text.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import isfinite

import numpy as np

from . import ggml
from .batch import UBatch, best_ubatch, check_tokens, split_equal
from .drafter import Drafter, check_head
from .errors import NonFinite, OptionError, StateError
from .graph.inputs import Sizes
from .graph.key import GraphKey
from .graph.options import GraphOptions
from .graph.support import resolve_options
from .graph_cache import GraphCache
from .graph_view import GraphView, list_graph
from .history import Checkpoints, History, common_prefix
from .memory import MIB, HybridMemory, Plan
from .memory.kv_cache import N_PAD, padded
from .one_token import OneToken
from .probes import Capture, Probes
from .session_file import save


class Session:
    """Hold the state of up to `n_seq_max` sequences of one model and decode tokens into it.

    `n_ctx` cells (rounded up to 256; 0 = what the model was trained for) are shared by all sequences. `n_ubatch` tokens are computed
    at once (None: what `best_ubatch` says). `n_rollback` older states are kept per sequence, so that `rewind` by as many tokens costs
    nothing; every `checkpoint_every` tokens (0 = never) states are copied to the host, `checkpoint_mib` at most, oldest dropped first.
    `mtp` keeps what the NextN head needs, so that `drafter` can guess tokens. `graph` is "auto", "plain" (llama.cpp's
    own graph), "lean" or a GraphOptions. `kv_device` is where K, V and recurrent states are kept, and what reads or writes
    them is computed; None is each layer's own device. Raises OptionError for a value that means nothing, BackendError when the state
    does not fit in memory, UnsupportedModelError for `mtp` and a file without a NextN head.
    """

    def __init__(
        self, model, *, n_ctx: int = 4096, n_seq_max: int = 1, n_ubatch: int | None = None, type_k: str = "f16",
        type_v: str = "f16", flash_attn: bool | str = "auto", n_rollback: int = 0, checkpoint_every: int = 0,
        checkpoint_mib: int = 1024, mtp: bool = False, delta_net: str = "auto", graph: str | GraphOptions = "auto",
        kv_device: str | None = None, n_threads: int | None = None,
    ):  # fmt: skip
        _check_sizes(n_ctx=(n_ctx, 0), n_seq_max=(n_seq_max, 1), n_rollback=(n_rollback, 0), checkpoint_every=(checkpoint_every, 0),
                     n_ubatch=(1 if n_ubatch is None else n_ubatch, 1), checkpoint_mib=(checkpoint_mib, 0))  # fmt: skip
        # what was asked for, not what it came to: elsewhere "auto" may come to something else
        self.settings = {name: x for name, x in locals().items() if name not in ("self", "model", "n_threads")}
        if mtp:
            check_head(model)
        self.model = model
        self.hparams = hp = model.hparams
        self.n_ctx = padded(n_ctx or hp.n_ctx_train)
        self.n_seq_max = n_seq_max
        self.checkpoint_every = checkpoint_every
        state_devices = model.layer_devices if kv_device is None else [ggml.device(kv_device)] * len(model.layer_devices)
        devices = list(dict.fromkeys([*model.devices, *state_devices]))
        resolved = resolve_options(graph, delta_net, flash_attn, hp, devices, n_ctx=self.n_ctx)
        self.options = resolved.for_session(type_v, n_seq_max, devices)
        # without the fused op all of q·k is in memory at once, and so is a state for each checkpoint of a ubatch
        tiled = model.tiles_experts and resolved.flash_attn and not checkpoint_every
        self.n_ubatch = min(n_ubatch or best_ubatch(hp.n_expert, hp.n_expert_used, self.n_ctx, tiled=tiled), self.n_ctx)
        self._one_by_one = self.options.delta_net == "autoregressive"
        n_tokens = 1 if self._one_by_one else self.n_ubatch
        # the most a ubatch can have: the first of them as early as can be
        marks = tuple(range(1, n_tokens, checkpoint_every)) if checkpoint_every else ()
        specs = model.arch.state_specs(hp, mtp=True) if mtp else model.arch.state_specs(hp)
        self.memory = HybridMemory(
            specs, state_devices, n_ctx=self.n_ctx, n_seq_max=n_seq_max, type_k=type_k, type_v=type_v,
            n_rollback=n_rollback, n_staging=len(marks), **self.options.kv_layout,
        )  # fmt: skip
        self.history = History(n_seq_max)
        self.checkpoints = Checkpoints(checkpoint_mib * MIB)
        self.last_evaluated = 0
        self.last_reuse = ""
        keep = self.memory.recurrent.keep(n_tokens, marks)
        worst = Sizes(n_tokens, 1, 1, self.n_ctx, None, keep, hidden=mtp)
        self.graphs = GraphCache(model, self.memory.state, self.options, worst, n_threads=n_threads or model.n_threads,
                                 state_devices=state_devices)  # fmt: skip
        self.graphs.before_use = self.history.settle
        self.probes = Probes(self.graphs, GraphKey(Sizes(1, 1, 1, N_PAD, None if n_rollback else 0, hidden=mtp), self.options))
        self.one_token = OneToken(self.graphs, self.memory, self.history, self.probes)
        self.drafter = Drafter(model, self.graphs, self.memory, self.history, self.options) if mtp else None

    # decoding

    def decode(self, tokens: Sequence[int], *, seq: int = 0, logits: str = "last") -> np.ndarray:
        """Append `tokens` to sequence `seq` → float32 logits [n_out, n_vocab].

        `logits` is "last" (1 row), "all" (one row per token) or "none" (0 rows). Raises OptionError for a token
        outside the vocabulary and ContextFull when they do not fit, the session being as it was; NonFinite when the
        logits are not numbers.
        """
        if logits == "last" and type(tokens) is list and len(tokens) == 1 and self._is_ordinary(tokens[0], seq):
            return self._decode_one(tokens[0], seq)[0]
        return self.decode_batch({seq: tokens}, logits=logits)[seq]

    def decode_batch(self, batch: Mapping[int, Sequence[int]], *, logits: str = "last") -> dict[int, np.ndarray]:
        """Append tokens to several sequences at once, of any lengths → sequence → logits [n_out, n_vocab]."""
        return self._decode(batch, logits, ())[0]

    def decode_top(self, token: int, k: int, *, seq: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Append one token to `seq` → ids int32 [k] and logits float32 [k] of the `k` likeliest next ones, likeliest first.

        They are found on the device and nothing else is copied, but for one token on a CPU, whose argmax takes longer than a copy and
        numpy's. Raises what `decode` does, OptionError for a `k` outside the vocabulary.
        """
        if not 1 <= k <= self.hparams.n_vocab:
            raise OptionError(f"k is {k}, expected 1 to {self.hparams.n_vocab}")
        in_graph = k > 1 or self.model.devices[0].kind != "cpu"
        if in_graph and self._is_ordinary(token, seq):
            ids, logits = self._decode_one(token, seq, k)
        else:
            row = self.decode([token], seq=seq)[0]
            ids = (np.argpartition(row, -k)[-k:] if k > 1 else row.argmax(keepdims=True)).astype(np.int32)
            logits = row[ids]
        order = np.lexsort((ids, -logits))
        return ids[order], logits[order]

    def capture(self, *patterns: str) -> AbstractContextManager[Capture]:
        """Read nodes by name in a `with` block: `with s.capture("attn_norm-0", "l_out-*") as t: …; t["l_out-3"]`.

        Globs over llama.cpp's names, "#n" behind one for its n-th occurrence in a layer. Values are float32 arrays with
        axes reversed from ggml order; reading changes no logits of the same graph, but switches off the fast options that
        remove or reshape a node asked for. Raises GraphError, with the closest names, for a pattern that names nothing.
        """
        return self.probes.capture(patterns)

    def patch(self, name: str, fn: Callable) -> AbstractContextManager[None]:
        """Replace nodes by name in a `with` block: `with s.patch("l_out-12", lambda g, x: g.scale(x, 0.5)): …`.

        `fn(g, x)` builds ggml nodes from the value and returns one of the same shape, so it runs on the device and on
        quantised weights; arrays enter through `g.input(name, array)`. Raises GraphError for a name that is not there or
        a value of another shape.
        """
        return self.probes.patch(name, fn)

    def debug_capture(
        self, batch: Mapping[int, Sequence[int]], patterns: Sequence[str] = ("*",), *, logits: str = "last"
    ) -> tuple[dict[int, np.ndarray], list[dict[tuple[str, int], tuple[str, tuple[int, ...], np.ndarray]]]]:
        """Like decode_batch, and per ubatch (name, occurrence) → (op, ne, value) of the nodes whose name matches."""
        return self._decode(batch, logits, tuple(patterns))

    def _decode(self, batch, logits: str, captures: tuple[str, ...]) -> tuple[dict[int, np.ndarray], list[dict]]:
        tokens = {seq: check_tokens(ids, self.hparams.n_vocab, seq) for seq, ids in batch.items()}
        if not tokens:
            raise OptionError("nothing to decode: the batch is empty")
        self.memory.check({seq: len(ids) for seq, ids in tokens.items()})
        past = dict(enumerate(self.memory.n_past))
        rows: dict[int, list[np.ndarray]] = {seq: [] for seq in tokens}
        captured = []
        # several sequences reach their checkpoints at different tokens, so they are cut there instead of marked
        cut_every = self.checkpoint_every if len(tokens) > 1 else 0
        for ubatch in split_equal(
            tokens, past, want=logits, n_ubatch=self.n_ubatch, max_seq_tokens=1 if self._one_by_one else None, cut_every=cut_every
        ):
            out, kept = self._run(ubatch, captures)
            captured += [kept] if captures else []
            for seq, i, n in ubatch.outputs:
                rows[seq].append(out[i : i + n])
        empty = np.empty((0, self.hparams.n_vocab), np.float32)
        return {seq: r[0] if len(r) == 1 else np.concatenate(r) if r else empty for seq, r in rows.items()}, captured

    def _is_ordinary(self, token: int, seq: int) -> bool:
        """Say whether a token can take the short way: no draft follows and no checkpoint is due after it."""
        return (
            type(token) is int and 0 <= token < self.hparams.n_vocab and self.one_token.is_ordinary(seq) and self.drafter is None
            and not (self.checkpoint_every and (self.memory.n_past[seq] + 1) % self.checkpoint_every == 0)
        )  # fmt: skip

    def _decode_one(self, token: int, seq: int, top: int = 0) -> list[np.ndarray]:
        self.one_token.prepare(token, seq, top)
        self.history.supersede(seq)
        try:
            outs = self.one_token.compute()
        except BaseException:
            ubatch, plan = self._planned(token, seq)
            self.memory.apply(ubatch, plan, failed=ubatch.seqs)
            raise
        if isfinite(outs[-1].item(0)):
            self.one_token.keep(token, seq)
        else:
            self._finish(*self._planned(token, seq), (), outs[-1].reshape(1, -1), None)
        return outs

    def _planned(self, token: int, seq: int) -> tuple[UBatch, Plan]:
        """Return what the general way would run for one more token of `seq`."""
        past = {seq: self.memory.n_past[seq]}
        [ubatch] = split_equal({seq: np.array([token], np.int32)}, past, want="last", n_ubatch=1)
        return ubatch, self.memory.plan(ubatch)

    def _run(self, ubatch: UBatch, captures: tuple[str, ...]) -> tuple[np.ndarray | None, dict]:
        marks = self._marks(ubatch)
        plan = self.memory.plan(ubatch, marks)
        sizes = Sizes(ubatch.n_seq_tokens, ubatch.n_seqs, len(ubatch.out_rows), plan.n_kv, plan.rs_head, plan.keep,
                      hidden=self.drafter is not None)  # fmt: skip
        built = self.graphs.get(self.probes.key(GraphKey(sizes, self.options, captures)))
        values = {**built.constants, "inp_tokens": ubatch.tokens, "inp_pos": ubatch.pos, "out_ids": ubatch.out_rows, **plan.inputs}
        out = None if built.logits is None else np.empty((len(ubatch.out_rows), self.hparams.n_vocab), np.float32)
        hidden = None if built.hidden is None else np.empty((ubatch.n_tokens, self.hparams.n_embd), np.float32)
        try:
            self.graphs.executor.run(built, built.arrange(values), [x for x in (out, hidden) if x is not None])
        except BaseException:
            self.memory.apply(ubatch, plan, failed=ubatch.seqs)
            raise
        kept = built.read_kept()
        self.probes.note(kept)
        self._finish(ubatch, plan, marks, out, hidden)
        if self.drafter:
            self.drafter.follow(ubatch.seqs)
        return out, {at: (node.op, node.ne, kept[at]) for at, (node, _) in built.kept.items()} if captures else {}

    def _finish(
        self, ubatch: UBatch, plan: Plan, marks: Sequence[int], out: np.ndarray | None, hidden: np.ndarray | None
    ) -> None:
        """Move the cursors, note tokens and logits, take the checkpoints that are due; refuse what is not finite."""
        failed = {}
        for seq, i, n in ubatch.outputs:
            # one NaN in the last hidden state makes every logit of its row NaN: one of them tells
            if not all(map(isfinite, out[i : i + n, 0].tolist())):
                failed[seq] = self.memory.recurrent.non_finite(seq, self.memory.n_past[seq] + ubatch.n_seq_tokens)
        self.memory.apply(ubatch, plan, failed)
        last = {seq: out[i + n - 1] for seq, i, n in ubatch.outputs}
        n_tokens = ubatch.n_seq_tokens
        for i, (seq, ids) in enumerate(zip(ubatch.seqs, ubatch.tokens.reshape(ubatch.n_seqs, -1).tolist())):
            if seq in failed:
                continue
            rows = None if hidden is None else hidden[i * n_tokens : (i + 1) * n_tokens]
            self.history.extend(seq, ids, last.get(seq), rows)
            n_past = self.memory.n_past[seq]
            for mark in marks:
                slot = self.memory.recurrent.slot_after(seq, n_past - n_tokens, mark, n_tokens, marks)
                self.checkpoints.add([seq], n_past - n_tokens + mark, self.memory.recurrent.snapshot(slot))
            if self.checkpoint_every and n_past % self.checkpoint_every == 0:
                self.checkpoint(seq)
        # attention spreads NaN to every sequence of a ubatch; the one with a sick state brought it in
        for seq, layers in sorted(failed.items(), key=lambda item: not item[1]):
            where = f"the state of layer {layers[0]}" if layers else "attention or the head"
            raise NonFinite(f"sequence {seq}: the logits are not finite; first seen in {where}")

    def _marks(self, ubatch: UBatch) -> tuple[int, ...]:
        """Return the token counts inside this ubatch at which a checkpoint is due; its end needs no mark."""
        if not self.checkpoint_every or ubatch.n_seqs > 1:
            return ()
        first = self.checkpoint_every - self.memory.n_past[ubatch.seqs[0]] % self.checkpoint_every
        return tuple(range(first, ubatch.n_seq_tokens, self.checkpoint_every))

    # moving about

    def prompt(self, tokens: Sequence[int], *, seq: int = 0) -> np.ndarray:
        """Bring `seq` to hold exactly `tokens`, evaluating as few as possible → logits of the last one [1, n_vocab].

        Reuses the longest usable prefix: what `tokens` extends, else a state from before the point where they part,
        out of the ring or a checkpoint, else nothing. `last_evaluated` says how many tokens were run, `last_reuse` why.
        Raises OptionError and ContextFull as `decode` does, with nothing changed.
        """
        ids = check_tokens(tokens, self.hparams.n_vocab, seq)
        self.memory.check_seq(seq)
        held, wanted = self.history[seq], ids.tolist()
        n_held, shared = len(held.tokens), common_prefix(held.tokens, wanted)
        if shared == n_held == len(wanted) and held.logits is not None and self.memory.can_rewind(seq, n_held):
            self.last_evaluated, self.last_reuse = 0, "nothing new: the last logits are still here"
            return held.logits[None].copy()
        # the last token is run again where its logits are gone
        kept = self.checkpoints.get(seq, len(wanted))
        limit = min(shared, len(wanted) - (kept is None or kept.logits is None))
        start = self._nearest(seq, limit) or 0
        self.memory.check_after(seq, start, len(wanted) - start)
        if start == n_held:
            reuse = f"extends the {n_held} tokens held" if n_held else "nothing was held"
        elif self.memory.can_rewind(seq, start):
            reuse = f"rolled back from {n_held} to {start}"
        else:
            how = f"went back to the checkpoint at {start}" if start else "no state from before that is kept, so it starts over"
            reuse = f"parts from the {n_held} tokens held after {limit}; {how}"
        self._go_back(seq, start)
        self.last_evaluated, self.last_reuse = len(wanted) - start, reuse
        return self.decode(ids[start:], seq=seq) if start < len(wanted) else held.logits[None].copy()

    def rewind(self, seq: int = 0, *, n: int) -> None:
        """Take back the last `n` tokens of `seq`.

        Up to `n_rollback` tokens, or all of them, an index moves; further back the nearest checkpoint is restored and
        the tokens after it are run again. Raises StateError, with nothing changed, where neither reaches.
        """
        self.memory.check_seq(seq)
        n_held = self.memory.n_past[seq]
        target = n_held - n
        if n < 0 or target < 0:
            raise StateError(f"sequence {seq} holds {n_held} tokens; {n} cannot be taken back")
        start = self._nearest(seq, target)
        if start is None:
            self.memory.check_whole(seq)
            raise StateError(
                f"sequence {seq} holds {n_held} tokens and cannot go back to {target}: the oldest state kept is that after "
                f"{self.memory.recurrent.oldest[seq]} tokens, and there is no checkpoint before"
            )
        again = self.history[seq].tokens[start:target]
        self.memory.check_after(seq, start, len(again))
        self._go_back(seq, start)
        if again:
            self.decode(again, seq=seq)

    def _nearest(self, seq: int, n_past: int) -> int | None:
        """Return the largest token count up to `n_past` that `seq` can be brought to without running anything."""
        if n_past == 0 or self.memory.can_rewind(seq, n_past):
            return n_past
        return self.checkpoints.best(seq, n_past)

    def _go_back(self, seq: int, n_past: int) -> None:
        """Bring `seq` to a token count that `_nearest` gave, or to 0."""
        kept = self.checkpoints.get(seq, n_past)
        if self.memory.can_rewind(seq, n_past):
            self.memory.rewind(seq, n_past)
        elif n_past == 0:
            self.memory.clear(seq)
        else:
            self.memory.restore(seq, n_past, kept.values)
        self.history.truncate(seq, n_past, None if kept is None else kept.logits)
        self.checkpoints.forget(seq, n_past)

    def fork(self, seq: int, *, dst: int) -> None:
        """Make sequence `dst` a copy of `seq`; the KV cells are shared until the two part."""
        self.memory.fork(seq, dst)
        self.history.fork(seq, dst)
        self.checkpoints.fork(seq, dst)

    def checkpoint(self, seq: int = 0) -> bool:
        """Copy the recurrent states of `seq` to the host, to go back to; False when the budget has no room for one."""
        self.memory.check({seq: 0})
        return self.checkpoints.add([seq], self.memory.n_past[seq], self.memory.snapshot(seq), self.history[seq].logits)

    def clear(self, seq: int = 0) -> None:
        """Forget sequence `seq`; it starts again from zeros."""
        self.memory.clear(seq)
        self.history.truncate(seq, 0)
        self.checkpoints.forget(seq)

    def save(self, path: str | os.PathLike, *, sampler=None) -> None:
        """Write everything the session holds to a file for `Model.load_session`, and where `sampler` is, if given.

        The file is replaced in one step; StateError when it cannot be written, and what was there stays.
        """
        save(self, path, sampler=sampler)

    # looking

    def n_past(self, seq: int = 0) -> int:
        """Return how many tokens sequence `seq` holds."""
        self.memory.check_seq(seq)
        return self.memory.n_past[seq]

    @property
    def n_rollback(self) -> int:
        return self.memory.recurrent.ring - 1

    @property
    def n_builds(self) -> int:
        return self.graphs.n_builds

    def state(self, il: int, seq: int = 0) -> dict[str, np.ndarray]:
        """Return layer `il`'s recurrent states of `seq`: "r" [channels, d_conv − 1], "s" [H_v, S_v, S_k]; empty for attention."""
        return self.memory.recurrent_state(il, seq)

    def graph(self, n_tokens: int = 1, *, lines: bool = False) -> GraphView:
        """Return, as data, the graph that takes `n_tokens` more tokens of sequence 0, patches included; nothing is computed.

        With `lines` every node knows the Python lines that made it. Raises OptionError for more tokens than are computed at once.
        """
        limit = 1 if self._one_by_one else self.n_ubatch
        if not 1 <= n_tokens <= limit:
            raise OptionError(f"n_tokens is {n_tokens}; this session computes 1 to {limit} tokens at once")
        n_kv = min(self.n_ctx, padded(self.n_past() + n_tokens))
        keep = self.memory.recurrent.keep(n_tokens)
        head = None if keep else self.memory.recurrent.head([0])
        sizes = Sizes(n_tokens, 1, 1, n_kv, head, keep, hidden=self.drafter is not None)
        return list_graph(self.model, self.memory.state, self.probes.key(GraphKey(sizes, self.options)), lines=lines)

    # life

    def close(self) -> None:
        """Free everything the session owns; a second call does nothing."""
        self.graphs.close()
        self.memory.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _check_sizes(**sizes: tuple[int, int]) -> None:
    for name, (value, low) in sizes.items():
        if value < low:
            raise OptionError(f"{name} must be at least {low}, got {value}")
