"""What a run is compared with, and the variants of it that a sweep goes through (level 11)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..ggml.provider import DEFAULT, PACKAGES
from .apart import look_apart, record_apart
from .compare import Comparison, compare
from .recording import Recording
from .sides import FLOAT64, LLAMA, Run

PLAIN = "plain"
UBATCHES = (1, 3, 64, 512)
# what a sweep can vary; other libggml take the longest and are asked for
AXES = ("ubatch", "flash_attn", "delta_net", "graph", "ggml")
SUFFIX = ".safetensors"


def reference_of(ref: str, run: Run, *, ggml: str | None = None) -> Run | Recording:
    """Return what `ref` means for `run`.

    "llama.cpp", a folder with a build of it, "float64", "plain" (llama.cpp's graph, ours otherwise), a file with a recording
    or a trace, or a device. `ggml` is the reference's provider, the run's own unless given. Raises what `Recording.load` raises.
    """
    if os.path.isdir(ref):
        return replace(reference_of(LLAMA, run), ggml=ref)
    if ref.endswith(SUFFIX) or os.sep in ref or os.path.isfile(ref):
        return Recording.load(ref)
    everyday = Run(tokens=run.tokens)
    if ref == FLOAT64:
        return replace(everyday, kind=FLOAT64, path=run.path)
    if ref == LLAMA:
        return replace(run, kind=LLAMA, device=everyday.device, ggml=None, graph=everyday.graph, delta_net=everyday.delta_net)
    if ref == PLAIN:
        return replace(run, graph=PLAIN, delta_net="auto", ggml=ggml or run.ggml)
    return replace(run, device=ref, ggml=ggml or run.ggml)


def cut_like(run: Run, wanted: Run | Recording) -> Run:
    """Return `run` with its last token among the others where what is `wanted` is a file made that way, else `run` itself."""
    whole = replace(run, step=False)
    same = isinstance(wanted, Recording) and whole.ubatches(run.n_ubatch) == list(wanted.ubatches)
    return whole if same else run


def variants(run: Run, axes: Sequence[str] = AXES[:-1]) -> Iterator[Run]:
    """Yield `run` over ubatch, flash attention, libggml, form of the delta rule and graph, those of them that are in `axes`.

    What llama.cpp has too varies slowest. A ubatch larger than the prompt is the whole of it, and one token at a time needs no other.
    """
    longest = max(map(len, run.batches))
    sizes = dict.fromkeys(min(n, longest) for n in UBATCHES) if "ubatch" in axes else (run.n_ubatch,)
    attentions = ("on", "off") if "flash_attn" in axes else (run.flash_attn,)
    libraries = providers(run.ggml) if "ggml" in axes else (run.ggml,)
    graphs = (PLAIN, "lean") if "graph" in axes else (run.graph,)
    for flash_attn, n_ubatch, library in product(attentions, sizes, libraries):
        forms = ("fused", "chunked", "autoregressive")[: 3 if n_ubatch == 1 else 2] if "delta_net" in axes else (run.delta_net,)
        for delta_net, graph in product(forms, graphs):
            yield replace(run, flash_attn=flash_attn, n_ubatch=n_ubatch, ggml=library, delta_net=delta_net, graph=graph)


def providers(first: str | None = None) -> tuple[str, ...]:
    """Return the libggml of every package that is installed, after `first` or what is used without a word."""
    first = first or os.environ.get("QGRAPH_GGML") or DEFAULT
    there = (name for name, (package, _) in PACKAGES.items() if importlib.util.find_spec(package) is not None)
    return tuple(dict.fromkeys((first, *there)))


def sweep(
    run: Run, ref: str, axes: Sequence[str] = AXES[:-1], *, tolerance: float, ggml: str | None = None
) -> Iterator[tuple[Run, Comparison]]:
    """Compare every variant of `run` with its reference, each in a process of its own; yields them as they are done.

    That every device is there is seen before the first. Raises what `look_apart` and `record_apart` raise.
    """
    look_apart(reference_of(ref, run, ggml=ggml), *variants(run, axes))
    wanted, reference = None, None
    for variant in variants(run, axes):
        now = reference_of(ref, variant, ggml=ggml) if wanted is None or isinstance(wanted, Run) else wanted
        if now != wanted or reference is None:
            wanted, reference = now, now if isinstance(now, Recording) else record_apart(now)
        yield variant, compare(record_apart(cut_like(variant, wanted)), reference, tolerance=tolerance)
