"""Run tokens and note the named values: a session, llama.cpp, or the float64 reference (level 11).

A session opens the one libggml of its process and llama.cpp another, so `apart` gives each a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from .. import ggml
from ..errors import OptionError
from ..ggml import types
from ..gguf_file import GgufFile
from ..graph.options import GraphOptions
from ..graph_view import GraphView
from ..graph_view.records import KERNEL, VIEW
from ..machine import available_cpus
from ..memory.kv_cache import padded
from ..model import embedded_model, load
from ..reference import STATES, ReferenceModel, hparams_from_metadata
from ..session import Session
from .recording import LAST, TOKENS, Recording, Value, merge, trimmed

SESSION, LLAMA, FLOAT64 = "session", "llama.cpp", "float64"
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one side does: `tokens` but the last in ubatches, the last as a step of its own, so that a state not kept shows.

    `kind` is SESSION, LLAMA or FLOAT64; `path` None is the embedded model. `device`, `graph` and `delta_net` are a
    session's, `ggml` is its provider, or the folder of a llama.cpp build; `patterns` are globs over the names to keep;
    without `step` the last token goes with the others. `options` are GraphOptions in the place of `graph`, `delta_net` and `flash_attn`.
    """

    kind: str = SESSION
    path: str | None = None
    tokens: tuple[int, ...]
    device: str = "CPU"
    ggml: str | None = None
    graph: str = "auto"
    delta_net: str = "auto"
    flash_attn: str = "auto"
    n_ubatch: int = 512
    n_threads: int | None = None
    type_k: str = "f32"
    type_v: str = "f32"
    patterns: tuple[str, ...] = ("*",)
    step: bool = True
    options: tuple[tuple[str, bool | str], ...] = ()

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """The tokens as they are handed in."""
        cut = len(self.tokens) - self.step
        return [batch for batch in (self.tokens[:cut], self.tokens[cut:]) if batch]

    @property
    def wanted(self) -> tuple[str, ...]:
        """The patterns, and the ids that values per expert are put in order by."""
        return (*self.patterns, "ffn_moe_topk-*") if any("moe" in pattern for pattern in self.patterns) else self.patterns

    @property
    def n_ctx(self) -> int:
        return padded(len(self.tokens))

    def ubatches(self, most: int) -> list[int]:
        """Return how many tokens each ubatch has when none has more than `most`."""
        return [min(most, len(batch) - start) for batch in self.batches for start in range(0, len(batch), most)]


def record(run: Run) -> Recording:
    """Run one side in this process. Raises what `load`, sessions and llama.cpp raise."""
    if not run.tokens:
        raise OptionError("nothing to compare: there are no tokens")
    return {SESSION: _session, LLAMA: _llama, FLOAT64: _float64}[run.kind](run)


@contextmanager
def opened(run: Run) -> Iterator[Session]:
    """Load the model of a run and open its session; weights stay as the file has them, for other layouts have other kernels."""
    graph = GraphOptions(**dict(run.options)) if run.options else run.graph
    with load(run.path, device=run.device.split(","), ggml=run.ggml, n_threads=run.n_threads, repack=False) as model:
        with model.session(
            n_ctx=run.n_ctx, n_ubatch=run.n_ubatch, graph=graph, delta_net=run.delta_net, flash_attn=run.flash_attn,
            type_k=run.type_k, type_v=run.type_v,
        ) as session:  # fmt: skip
            yield session


def _session(run: Run) -> Recording:
    with opened(run) as session:
        options = session.options
        n_tokens = run.ubatches(1 if options.delta_net == "autoregressive" else run.n_ubatch)
        notes = _notes(session.graph(n_tokens[0], lines=True))
        ubatches = [u for batch in run.batches for u in session.debug_capture({0: batch}, run.wanted, logits="all")[1]]
    provider = ggml.provider()
    title = (
        f"{run.device}, ggml {provider.version} of {provider.name}, graph {run.graph}, delta net {options.delta_net}, "
        f"flash attention {'on' if options.flash_attn else 'off'}, ubatch {run.n_ubatch}"
    )
    return Recording(title, run.tokens, tuple(n_tokens), merge(ubatches, n_tokens, notes), asdict(options))


def _notes(view: GraphView) -> dict[tuple[str, int], tuple[str, tuple, str, tuple]]:
    """Return for each named node the kernel behind it, what that reads, which line made the node, and what quantised is multiplied with."""
    seen: dict[str, int] = {}
    notes = {}
    for node in view.nodes:
        occurrence = seen[node.name] = seen.get(node.name, -1) + 1
        kernel = node
        while kernel.kind == VIEW and view.by_id[kernel.sources[0]].kind in (VIEW, KERNEL):
            kernel = view.by_id[kernel.sources[0]]
        sources = [view.by_id[source] for source in kernel.sources]
        inputs = tuple((source.name, source.shape) for source in sources)
        factors = sources if kernel.op in PRODUCTS else ()
        quantised = next(((x.name, x.type) for x in factors if types.GgmlType.of(x.type).is_quantized), ())
        notes[node.name, occurrence] = kernel.op, inputs, node.line, quantised
    return notes


def _llama(run: Run) -> Recording:
    from ..ggml.llama import Llama, LlamaOptions, Recorder

    options = LlamaOptions(
        n_ctx=run.n_ctx, n_ubatch=run.n_ubatch, n_batch=max(len(run.tokens), run.n_ubatch), flash_attn=run.flash_attn != "off",
        n_threads=run.n_threads or available_cpus(), type_k=run.type_k, type_v=run.type_v, folder=run.ggml,
    )  # fmt: skip
    recorder = Recorder(run.wanted)
    llama = Llama(run.path or str(embedded_model()), options, recorder=recorder)
    try:
        at = 0
        for i, batch in enumerate(run.batches):
            recorder.start_step(i)
            llama.decode([(token, at + j, 0, True) for j, token in enumerate(batch)])
            at += len(batch)
        whose = f"llama.cpp of {run.ggml}" if run.ggml else "llama.cpp"
        title = f"{whose}, ggml {llama.ggml_version}, flash attention {'on' if options.flash_attn else 'off'}, ubatch {run.n_ubatch}"
    finally:
        llama.close()
    graphs: dict[tuple[int, int], dict] = {}
    for node in recorder.nodes:
        graphs.setdefault((node.step, node.ubatch), {})[node.name, node.occurrence] = (node.op, node.ne, node.array)
    n_tokens = run.ubatches(run.n_ubatch)
    return Recording(title, run.tokens, tuple(n_tokens), merge(list(graphs.values()), n_tokens))


def _float64(run: Run) -> Recording:
    model, traces = float64_model(run.path), []
    for batch in run.batches:
        traces.append({})
        model.decode(batch, trace=traces[-1])
    values = []
    for full in traces[0]:
        # of a state what the last batch found or left
        state, arrays = full.startswith(STATES), [trace[full] for trace in traces]
        array = arrays[-1] if state else np.concatenate(arrays)
        name, _, occurrence = full.partition("#")
        ne = trimmed(array.shape[::-1])
        dtype = np.int32 if array.dtype.kind in "iu" else np.float32
        how = LAST if state else TOKENS
        values.append(Value(name, int(occurrence) if occurrence else None, "", ne, how, np.ascontiguousarray(array, dtype)))
    return Recording("float64 reference", run.tokens, (len(run.tokens),), tuple(values))


def float64_model(path: str | os.PathLike | None = None) -> ReferenceModel:
    """Return the float64 model of a GGUF file, weights dequantised by gguf-py; all of it is held in memory, 8 bytes a weight."""
    from gguf import GGMLQuantizationType, quants

    with GgufFile.open(path or embedded_model()) as file:
        weights = {}
        for name, info in file.tensors.items():
            kind = GGMLQuantizationType(info.type_id)
            raw = np.asarray(file.data(name)).reshape(*info.ne[:0:-1], -1)
            weights[name] = quants.dequantize(raw, kind).astype(np.float64)
        return ReferenceModel(hparams_from_metadata(dict(file.metadata), file.arch), weights)
