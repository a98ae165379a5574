"""Decode tokens: choose a graph, build or reuse it, fill, compute, read (level 8).

One session owns the state of its sequences and its compute buffer; it knows nothing of text.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from . import ggml
from .batch import UBatch, check_tokens, split_equal
from .errors import OptionError, QGraphError, StateError
from .executor import Built, ManyDevices, OneDevice
from .graph.builder import GraphBuilder, capture
from .graph.inputs import Inputs, Sizes
from .graph.key import GraphKey, node_budget
from .graph.options import LEAN, PLAIN, GraphOptions
from .graph.support import resolve_delta_net, resolve_flash_attn
from .memory import HybridMemory, Plan

N_PAD = 256
MAX_GRAPHS = 16


class Session:
    """Hold the state of up to `n_seq_max` sequences of one model and decode tokens into it.

    `n_ctx` cells (rounded up to 256; 0 = what the model was trained for) are shared by all sequences. `graph` is
    "auto", "plain" (llama.cpp's own graph), "lean" or a GraphOptions. Raises OptionError for a value that means
    nothing and BackendError when the state does not fit in memory.
    """

    def __init__(
        self, model, *, n_ctx: int = 4096, n_seq_max: int = 1, n_ubatch: int = 512, type_k: str = "f16",
        type_v: str = "f16", flash_attn: bool | str = "auto", delta_net: str = "auto",
        graph: str | GraphOptions = "auto", n_threads: int | None = None,
    ):  # fmt: skip
        for name, value, low in (("n_ctx", n_ctx, 0), ("n_seq_max", n_seq_max, 1), ("n_ubatch", n_ubatch, 1)):
            if value < low:
                raise OptionError(f"{name} must be at least {low}, got {value}")
        self.model = model
        self.hparams = hp = model.hparams
        self.n_ctx = -(-(n_ctx or hp.n_ctx_train) // N_PAD) * N_PAD
        self.n_seq_max = n_seq_max
        self.n_ubatch = min(n_ubatch, self.n_ctx)
        self.options = self._resolve(graph, delta_net, flash_attn)
        self.memory = HybridMemory(
            model.arch.state_specs(hp), model.layer_devices, n_ctx=self.n_ctx, n_seq_max=n_seq_max,
            type_k=type_k, type_v=type_v, flash_attn=self.options.flash_attn,
        )  # fmt: skip
        self.n_builds = 0
        self.last_evaluated = 0
        self._tokens: dict[int, list[int]] = {}
        self._graphs: OrderedDict[GraphKey, Built] = OrderedDict()
        self._executor = self._make_executor(n_threads or model.n_threads)

    def _resolve(self, graph, delta_net, flash_attn) -> GraphOptions:
        named = {"plain": PLAIN, "lean": LEAN, "auto": LEAN if self.model.devices[0].kind == "cpu" else PLAIN}
        if isinstance(graph, GraphOptions):
            return graph
        if graph not in named:
            raise OptionError(f"graph must be one of {', '.join(named)}, got {graph!r}")
        devices = self.model.devices
        return named[graph].but(
            delta_net=resolve_delta_net(delta_net, self.hparams, devices),
            flash_attn=resolve_flash_attn(flash_attn, self.hparams, devices),
        )

    def _make_executor(self, n_threads: int) -> OneDevice | ManyDevices:
        backends = [device.init() for device in self.model.devices]
        for backend in backends:
            backend.set_n_threads(n_threads)
        n_tokens = 1 if self.options.delta_net == "autoregressive" else self.n_ubatch
        worst = GraphKey(Sizes(n_tokens, 1, 1, self.n_ctx, 0), self.options)
        if len(backends) == 1:
            executor = OneDevice(backends[0])
        else:
            executor = ManyDevices(backends, 2 * node_budget(worst, self.hparams.n_layer_all, self.hparams.n_expert_used))
        built = self._build(worst)
        executor.reserve(built)
        built.close()
        return executor

    # decoding

    def decode(self, tokens: Sequence[int], *, seq: int = 0, logits: str = "last") -> np.ndarray:
        """Append `tokens` to sequence `seq` → float32 logits [n_out, n_vocab].

        `logits` is "last" (1 row), "all" (one row per token) or "none" (0 rows). Raises OptionError for a token
        outside the vocabulary, ContextFull when they do not fit; the session is then as it was.
        """
        return self.decode_batch({seq: tokens}, logits=logits)[seq]

    def decode_batch(self, batch: Mapping[int, Sequence[int]], *, logits: str = "last") -> dict[int, np.ndarray]:
        """Append tokens to several sequences at once, of any lengths → sequence → logits [n_out, n_vocab]."""
        return self._decode(batch, logits, ())[0]

    def _decode(self, batch, logits: str, captures: tuple[str, ...]) -> tuple[dict[int, np.ndarray], list[dict]]:
        tokens = {seq: check_tokens(ids, self.hparams.n_vocab, seq) for seq, ids in batch.items()}
        if not tokens:
            raise OptionError("nothing to decode: the batch is empty")
        self.memory.check({seq: len(ids) for seq, ids in tokens.items()})
        one_by_one = 1 if self.options.delta_net == "autoregressive" else None
        past = dict(enumerate(self.memory.n_past))
        rows: dict[int, list[np.ndarray]] = {seq: [] for seq in tokens}
        captured = []
        for ubatch in split_equal(tokens, past, want=logits, n_ubatch=self.n_ubatch, max_seq_tokens=one_by_one):
            built, out = self._run(ubatch, captures)
            captured += [{at: (node.op, node.ne, value.get()) for at, (node, value) in built.kept.items()}] if captures else []
            self._collect(ubatch, out, rows)
        empty = np.empty((0, self.hparams.n_vocab), np.float32)
        return {seq: r[0] if len(r) == 1 else np.concatenate(r) if r else empty for seq, r in rows.items()}, captured

    def _run(self, ubatch: UBatch, captures: tuple[str, ...] = ()) -> tuple[Built, np.ndarray | None]:
        plan = self.memory.plan(ubatch)
        sizes = Sizes(ubatch.n_seq_tokens, ubatch.n_seqs, len(ubatch.out_rows), plan.n_kv, plan.rs_head)
        built = self._graph_for(GraphKey(sizes, self.options, captures))
        values = {"inp_tokens": ubatch.tokens, "inp_pos": ubatch.pos, "out_ids": ubatch.out_rows, **plan.inputs}
        out = None if built.logits is None else np.empty((len(ubatch.out_rows), self.hparams.n_vocab), np.float32)
        try:
            self._executor.run(built, values, out)
        except BaseException:
            self.memory.interrupt(ubatch)
            raise
        self.memory.apply(ubatch, plan)
        for seq, ids in zip(ubatch.seqs, ubatch.tokens.reshape(ubatch.n_seqs, -1).tolist()):
            self._tokens.setdefault(seq, []).extend(ids)
        return built, out

    @staticmethod
    def _collect(ubatch: UBatch, out: np.ndarray | None, rows: dict[int, list[np.ndarray]]) -> None:
        start = 0
        for seq in ubatch.seqs:
            n = sum(1 for s, _ in ubatch.out_slots if s == seq)
            if n:
                rows[seq].append(out[start : start + n])
                start += n

    def prompt(self, tokens: Sequence[int], *, seq: int = 0, logits: str = "last") -> np.ndarray:
        """Bring `seq` to hold exactly `tokens`, evaluating only what it does not hold yet → logits of the new tokens.

        The state is kept when `tokens` extends what the sequence holds, else the sequence starts over.
        `last_evaluated` says how many tokens were run.
        """
        ids = check_tokens(tokens, self.hparams.n_vocab, seq)
        held = self._tokens.get(seq, [])
        keep = len(held) if len(held) < len(ids) and ids[: len(held)].tolist() == held else 0
        if len(ids) > self.n_ctx:
            self.memory.check({seq: len(ids)})
        if not keep:
            self.clear(seq)
        self.last_evaluated = len(ids) - keep
        return self.decode(ids[keep:], seq=seq, logits=logits)

    # sequences

    def n_past(self, seq: int = 0) -> int:
        """Return how many tokens sequence `seq` holds."""
        if not 0 <= seq < self.n_seq_max:
            raise StateError(f"sequence {seq} does not exist; n_seq_max={self.n_seq_max}")
        return self.memory.n_past[seq]

    def clear(self, seq: int = 0) -> None:
        """Forget sequence `seq`; it starts again from zeros."""
        self.memory.clear(seq)
        self._tokens.pop(seq, None)

    def state(self, il: int, seq: int = 0) -> dict[str, np.ndarray]:
        """Return layer `il`'s recurrent states of `seq`: "r" [channels, d_conv − 1], "s" [H_v, S_v, S_k]; empty for attention."""
        return {name: self.memory.recurrent.read(i, name, seq) for i, name in self.memory.recurrent.states if i == il}

    # graphs

    def _graph_for(self, key: GraphKey) -> Built:
        built = self._graphs.get(key)
        if built is not None:
            self._graphs.move_to_end(key)
            return built
        built = self._build(key)
        self.n_builds += 1
        if self._executor.place(built):
            self._drop_graphs()
        self._graphs[key] = built
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].close()
        return built

    def _build(self, key: GraphKey) -> Built:
        hp, arch, weights = self.hparams, self.model.arch, self.model.weights
        budget = node_budget(key, hp.n_layer_all, hp.n_expert_used)
        ctx = ggml.Context(budget, graph_size=budget)
        graph = ggml.Graph(ctx, budget)
        g = GraphBuilder(ctx, graph, key.options, scales=weights.scales)
        logits = arch.build_arch_graph(g, hp, weights, Inputs(g, key.sizes, **arch.inputs(hp)), self.memory.state)
        device_of = g.node_layers() if len(self.model.devices) > 1 else {}
        kept = {}
        if key.captures:
            graph, kept = capture(g, graph, lambda name: any(fnmatchcase(name, p) for p in key.captures))
        if logits is not None:
            g.set_output(logits)
        return Built(ctx, graph, g.inputs, logits, kept, {x: self.model.device_index(il) for x, il in device_of.items()})

    def debug_capture(
        self, batch: Mapping[int, Sequence[int]], patterns: Sequence[str] = ("*",), *, logits: str = "last"
    ) -> tuple[dict[int, np.ndarray], list[dict[tuple[str, int], tuple[str, tuple[int, ...], np.ndarray]]]]:
        """Like decode_batch, and per ubatch (name, occurrence) → (op, ne, value) of the nodes whose name matches."""
        return self._decode(batch, logits, tuple(patterns))

    def _drop_graphs(self) -> None:
        for built in self._graphs.values():
            built.close()
        self._graphs.clear()

    # life

    def close(self) -> None:
        """Free everything the session owns; a second call does nothing."""
        self._drop_graphs()
        self._executor.close()
        self.memory.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()
