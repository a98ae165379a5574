"""Decode tokens and move about in what was decoded (level 8).

A session owns the state of its sequences and its compute buffer; it knows nothing of text.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from . import ggml
from .batch import best_ubatch, check_tokens
from .decoder import Captured, Decoder
from .drafter import Drafter, check_head
from .errors import OptionError, StateError, check_count
from .graph.inputs import Sizes
from .graph.key import GraphKey
from .graph.options import GraphOptions
from .graph.support import resolve_options
from .graph_cache import GraphCache
from .graph_view import GraphView, list_graph
from .history import Checkpoints, History, common_prefix
from .memory import MIB, HybridMemory
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
        # what was asked for, not what it came to: elsewhere "auto" may come to something else
        self.settings = {name: x for name, x in locals().items() if name not in ("self", "model", "n_threads")}
        for name, low in (("n_ctx", 0), ("n_seq_max", 1), ("n_rollback", 0), ("checkpoint_every", 0), ("checkpoint_mib", 0)):
            check_count(name, self.settings[name], low)
        for name, size in (("n_ubatch", n_ubatch), ("n_threads", n_threads)):
            if size is not None:
                check_count(name, size, 1)
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
        n_tokens = 1 if self.options.delta_net == "autoregressive" else self.n_ubatch
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
        self.graphs = GraphCache(model, self.memory.state, self.options, worst, n_seq_max=n_seq_max,
                                 n_threads=n_threads or model.n_threads, state_devices=state_devices)  # fmt: skip
        self.graphs.before_use = self.history.settle
        self.probes = Probes(self.graphs, GraphKey(Sizes(1, 1, 1, N_PAD, None if n_rollback else 0, hidden=mtp), self.options))
        self.drafter = Drafter(model, self.graphs, self.memory, self.history, self.options) if mtp else None
        self.one_token = OneToken(self.graphs, self.memory, self.history, self.probes)
        self._decoder = Decoder(
            hp, self.options, self.graphs, self.memory, self.history, self.probes, self.one_token, self.checkpoints, self.drafter,
            n_ubatch=self.n_ubatch, max_seq_tokens=n_tokens, every=checkpoint_every,
        )  # fmt: skip

    # decoding

    def decode(self, tokens: Sequence[int], *, seq: int = 0, logits: str = "last") -> np.ndarray:
        """Append `tokens` to sequence `seq` → float32 logits [n_out, n_vocab].

        `logits` is "last" (1 row), "all" (one row per token) or "none" (0 rows). Raises OptionError for a token
        outside the vocabulary and ContextFull when they do not fit, the session being as it was; NonFinite when the
        logits are not numbers.
        """
        if logits == "last" and type(tokens) is list and len(tokens) == 1 and self._decoder.is_ordinary(tokens[0], seq):
            return self._decoder.one(tokens[0], seq)[0]
        return self.decode_batch({seq: tokens}, logits=logits)[seq]

    def decode_batch(self, batch: Mapping[int, Sequence[int]], *, logits: str = "last") -> dict[int, np.ndarray]:
        """Append tokens to several sequences at once, of any lengths → sequence → logits [n_out, n_vocab]."""
        return self._decoder.batch(batch, logits)[0]

    def decode_top(self, token: int, k: int, *, seq: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Append one token to `seq` → ids int32 [k] and logits float32 [k] of the `k` likeliest next ones, likeliest first.

        They are found on the device and nothing else is copied, but for one token on a CPU, whose argmax takes longer than a copy and
        numpy's. Raises what `decode` does, OptionError for a `k` outside the vocabulary.
        """
        if not 1 <= k <= self.hparams.n_vocab:
            raise OptionError(f"k is {k}, expected 1 to {self.hparams.n_vocab}")
        in_graph = k > 1 or self.model.devices[0].kind != "cpu"
        if in_graph and self._decoder.is_ordinary(token, seq):
            ids, logits = self._decoder.one(token, seq, k)
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
        self.memory.check_open()
        return self.probes.capture(patterns)

    def patch(self, name: str, fn: Callable) -> AbstractContextManager[None]:
        """Replace nodes by name in a `with` block: `with s.patch("l_out-12", lambda g, x: g.scale(x, 0.5)): …`.

        `fn(g, x)` builds ggml nodes from the value and returns one of the same shape, so it runs on the device and on
        quantised weights; arrays enter through `g.input(name, array)`. Raises GraphError for a name that is not there or
        a value of another shape.
        """
        self.memory.check_open()
        return self.probes.patch(name, fn)

    def debug_capture(
        self, batch: Mapping[int, Sequence[int]], patterns: Sequence[str] = ("*",), *, logits: str = "last"
    ) -> tuple[dict[int, np.ndarray], list[Captured]]:
        """Like decode_batch, and per ubatch (name, occurrence) → (op, ne, value) of the nodes whose name matches."""
        return self._decoder.batch(batch, logits, tuple(patterns))

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
        return self._decoder.checkpoint(seq)

    def clear(self, seq: int = 0) -> None:
        """Forget sequence `seq`; it starts again from zeros."""
        self.memory.clear(seq)
        self.history.truncate(seq, 0)
        self.checkpoints.forget(seq)

    def save(self, path: str | os.PathLike, *, sampler=None) -> None:
        """Write everything the session holds to a file for `Model.load_session`, and where `sampler` is, if given.

        The file is replaced in one step; StateError when it cannot be written, and what was there stays.
        """
        self.memory.check_open()
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
        """Return layer `il`'s recurrent states of `seq`: "r" [channels, d_conv − 1], "s" [H_v, S_v, S_k]; empty for attention.

        Raises OptionError for a layer that is not there.
        """
        if not 0 <= il < self.hparams.n_layer:
            raise OptionError(f"there is no layer {il}; the model has 0 to {self.hparams.n_layer - 1}")
        return self.memory.recurrent_state(il, seq)

    def graph(self, n_tokens: int = 1, *, lines: bool = False) -> GraphView:
        """Return, as data, the graph that takes `n_tokens` more tokens of sequence 0, patches included; nothing is computed.

        With `lines` every node knows the Python lines that made it. Raises OptionError for more tokens than are computed at once.
        """
        limit = self._decoder.max_seq_tokens
        if not 1 <= n_tokens <= limit:
            raise OptionError(f"n_tokens is {n_tokens}; this session computes 1 to {limit} tokens at once")
        n_kv = min(self.n_ctx, padded(self.n_past() + n_tokens))
        keep = self.memory.recurrent.keep(n_tokens)
        head = None if keep else self.memory.recurrent.head([0])
        sizes = Sizes(n_tokens, 1, 1, n_kv, head, keep, hidden=self.drafter is not None)
        return list_graph(self.model, self.memory.state, self.probes.key(GraphKey(sizes, self.options)), lines=lines)

    # life

    def close(self) -> None:
        """Free everything the session owns; whatever is asked of it then is a StateError. A second call does nothing."""
        self.graphs.close()
        self.memory.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()
