"""Where the time of a prompt and of a decode step goes, node by node (level 11).

A backend computes a graph in one call and tells nothing of its nodes, so they are computed one call at a time, in order, over
the same tensors; what an empty call costs is measured and taken off. Pairs that ggml fuses run as two. Knows nothing of text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np

from . import ggml
from .errors import OptionError
from .executor import Built, OneDevice
from .ggml import types
from .graph_view.costs import VIEW_OPS
from .graph_view.records import VIEW, Node

PROBE_ROWS, PROBE_COLUMNS, N_PROBES = 8192, 4096, 20
N_CALLS = 300
N_PROMPTS = 5


@dataclass(frozen=True)
class Share:
    """What the nodes of one scope or op took: seconds, bytes read and written, FLOPs."""

    name: str
    n_nodes: int
    seconds: float
    nbytes: int
    flops: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Timed:
    """A node and how long it took, in seconds."""

    node: Node
    seconds: float


@dataclass(frozen=True)
class Pass:
    """One graph: seconds in one call, seconds node by node with all the calls, and the nodes without them."""

    what: str
    title: str
    n_tokens: int
    nodes: tuple[Timed, ...]
    whole: float
    apart: float

    @property
    def total(self) -> float:
        """Seconds of all nodes together, to be compared with `whole`."""
        return sum(timed.seconds for timed in self.nodes)

    def by(self, key: str) -> list[Share]:
        """Return the shares of each "scope" or "op", longest first."""
        groups: dict[str, list[Timed]] = {}
        for timed in self.nodes:
            groups.setdefault(getattr(timed.node, key), []).append(timed)
        return sorted((_share(name, members) for name, members in groups.items()), key=lambda share: -share.seconds)

    @property
    def all(self) -> Share:
        return _share("all", self.nodes)

    def without_calls(self, call: float) -> Pass:
        """Return this pass with the seconds of a call taken off each node."""
        return replace(self, nodes=tuple(Timed(timed.node, timed.seconds - call) for timed in self.nodes))


@dataclass(frozen=True)
class Profile:
    """Passes, the seconds one call costs, and the bytes per second that all threads together read from memory."""

    passes: tuple[Pass, ...]
    call: float
    bandwidth: float

    def chrome_trace(self) -> str:
        """Return the passes, one after the other, as chrome://tracing and Perfetto read them."""
        events, at = [], 0.0
        for one in self.passes:
            events.append(_event(f"{one.what}: {one.title}", "pass", at, one.total, tid=0))
            for timed in one.nodes:
                node = timed.node
                args = {"op": node.op, "layer": node.layer, "shape": list(node.shape), "type": node.type,
                        "bytes": node.bytes_read + node.bytes_written, "flops": node.flops}  # fmt: skip
                events.append(_event(node.name or node.op, node.scope, at, timed.seconds, tid=1, args=args))
                at += timed.seconds
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def profile(model, *, n_prompt: int = 512, n_gen: int = 32, **options) -> Profile:
    """Time a prompt of `n_prompt` tokens and `n_gen` decode steps after it, 0 for none; `options` are those of a session.

    Runs in one call alternate with runs node by node, and the shortest of either counts. Raises OptionError for
    a prompt of more than one ubatch, and for a model on several devices.
    """
    if n_prompt < 0 or n_gen < 0 or not n_prompt + n_gen:
        raise OptionError(f"a profile of {n_prompt} prompt tokens and {n_gen} steps: at least one of either is needed")
    if len(model.devices) > 1:
        raise OptionError(f"a profile is taken on one device, the model is on {len(model.devices)}")
    with model.session(**options) as session, _watched(session) as watch:
        if n_prompt > session.n_ubatch:
            raise OptionError(f"a profile takes the prompt at once: {n_prompt} tokens, an ubatch has at most {session.n_ubatch}")
        tokens = np.random.default_rng(1).integers(0, model.hparams.n_vocab, n_prompt + 2 * n_gen)
        passes = []
        if n_prompt:
            runs = [lambda: (session.clear(), session.decode(tokens[:n_prompt]))] * (2 * N_PROMPTS)
            passes.append(_pass("prompt", session, n_prompt, watch, runs))
        if n_gen:
            runs = [lambda at=n_prompt + i: session.decode(tokens[at : at + 1]) for i in range(2 * n_gen)]
            passes.append(_pass("step", session, 1, watch, runs))
        # a call was timed when the machine may have been slower: it took no longer than the shortest node with its call
        call = min([watch.call, *(timed.seconds for one in passes for timed in one.nodes)])
        return Profile(tuple(one.without_calls(call) for one in passes), call, read_bandwidth(watch.backend))


def _pass(what: str, session, n_tokens: int, watch: _Watch, runs: Sequence) -> Pass:
    """Do `runs`, in turns at once and node by node, calls included; the first one's graph is built and warm before the clock counts."""
    watch.apart = False
    if what == "prompt":
        runs[0]()
        session.clear()
    view = session.graph(n_tokens)
    kernels = [node for node in view.nodes if node.kind != VIEW]
    whole, apart = [], []
    for i, run in enumerate(runs):
        watch.apart = bool(i % 2)
        run()
        (apart if watch.apart else whole).append((watch.seconds, watch.spans))
    # other programs only ever add to a run, so the shortest one tells most, and its parts belong together
    seconds, spans = min(apart)
    timed = tuple(Timed(node, span) for node, span in zip(kernels, spans, strict=True))
    return Pass(what, view.title, n_tokens, timed, min(whole)[0], seconds)


class _Watch:
    """An executor in the place of `inner` that notes what runs take; with `apart` it computes node by node."""

    def __init__(self, inner: OneDevice):
        self.inner, self.backend = inner, inner.backend
        self.apart = False
        self.seconds = 0.0
        self.spans: list[float] = []
        self._one = ggml.Excerpt(self.backend)
        self.call = self._cost_of_a_call()

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def run(self, built: Built, arrays: tuple[np.ndarray, ...], outs: Sequence[np.ndarray]) -> None:
        """Run `built` as its executor does, or node by node."""
        if not self.apart:
            start = perf_counter()
            self.inner.run(built, arrays, outs)
            self.seconds = perf_counter() - start
            return
        nodes = [node for node in built.graph.nodes if node.op not in VIEW_OPS]
        for x, array in zip(built.inputs.values(), arrays, strict=True):
            x.set(array)
        self.spans = self._spans(nodes)
        self.seconds = sum(self.spans)
        for x, out in zip(built.outputs, outs, strict=True):
            out[:] = x.get().reshape(out.shape)

    def _spans(self, nodes: Sequence[ggml.Tensor]) -> list[float]:
        """Compute one after the other → seconds from the end of the one before to the end of each."""
        spans, before = [], perf_counter()
        for node in nodes:
            self._one.run(node)
            now = perf_counter()
            spans.append(now - before)
            before = now
        return spans

    def _cost_of_a_call(self) -> float:
        with ggml.Context(4, graph_size=4) as ctx:
            graph, x = ggml.Graph(ctx, 4), ctx.new_tensor(types.F32, 1)
            graph.expand(ggml.Ops(ctx).sqr(x))
            with ggml.GraphAllocator([self.backend.device.buffer_type()]) as allocator:
                allocator.alloc(graph)
                return median(self._spans(graph.nodes * N_CALLS))

    def close(self) -> None:
        self._one.close()


@contextmanager
def _watched(session) -> Iterator[_Watch]:
    inner = session.graphs.executor
    watch = session.graphs.executor = _Watch(inner)
    try:
        yield watch
    finally:
        session.graphs.executor = inner
        watch.close()


def read_bandwidth(backend: ggml.Backend) -> float:
    """Return the bytes per second at which a product reads a matrix of 128 MiB, the best of a few times."""
    with ggml.Context(8, graph_size=4) as ctx:
        graph = ggml.Graph(ctx, 4)
        w, x = ctx.new_tensor(types.F32, PROBE_COLUMNS, PROBE_ROWS), ctx.new_tensor(types.F32, PROBE_COLUMNS)
        graph.expand(ggml.Ops(ctx).mul_mat(w, x))
        with ggml.alloc_tensors(ctx, backend.device.buffer_type()) as buffer:
            # pages that were never written are one page of zeros
            buffer.clear(1)
            times = []
            for _ in range(N_PROBES):
                start = perf_counter()
                backend.compute(graph)
                times.append(perf_counter() - start)
            return w.nbytes / min(times)


def _share(name: str, members: Sequence[Timed]) -> Share:
    nodes = [timed.node for timed in members]
    return Share(
        name, len(nodes), sum(timed.seconds for timed in members),
        sum(node.bytes_read + node.bytes_written for node in nodes), sum(node.flops for node in nodes),
    )  # fmt: skip


def _event(name: str, category: str, start: float, seconds: float, *, tid: int, args: Mapping | None = None) -> dict:
    return {"name": name, "cat": category, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * seconds, "pid": 0, "tid": tid, "args": args or {}}
