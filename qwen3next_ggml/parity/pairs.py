"""What a run is compared with, and the variants of it that a sweep goes through (level 11)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from .apart import record_apart
from .compare import Comparison, compare
from .recording import Recording
from .sides import FLOAT64, LLAMA, Run

PLAIN = "plain"
UBATCHES = (1, 3, 64, 512)
SUFFIX = ".safetensors"


def reference_of(ref: str, run: Run, *, ggml: str | None = None) -> Run | Recording:
    """Return what `ref` means for `run`: "llama.cpp", "float64", "plain" (llama.cpp's graph, ours otherwise), a recording, or a device.

    `ggml` is the reference's provider, the run's own unless given. Raises what `Recording.load` raises.
    """
    if ref.endswith(SUFFIX) or os.path.isfile(ref):
        return Recording.load(ref)
    everyday = Run(tokens=run.tokens)
    if ref == FLOAT64:
        return replace(everyday, kind=FLOAT64, path=run.path)
    if ref == LLAMA:
        return replace(run, kind=LLAMA, device=everyday.device, ggml=None, graph=everyday.graph, delta_net=everyday.delta_net)
    if ref == PLAIN:
        return replace(run, graph=PLAIN, delta_net="auto", ggml=ggml or run.ggml)
    return replace(run, device=ref, ggml=ggml or run.ggml)


def variants(run: Run) -> Iterator[Run]:
    """Yield `run` over flash attention, ubatch, form of the delta rule and graph; what llama.cpp has too varies slowest.

    A ubatch larger than the prompt is the whole of it, and one token at a time needs no other ubatch.
    """
    longest = max(map(len, run.batches))
    sizes = dict.fromkeys(min(n, longest) for n in UBATCHES)
    for flash_attn, n_ubatch in product(("on", "off"), sizes):
        forms = ("fused", "chunked", "autoregressive") if n_ubatch == 1 else ("fused", "chunked")
        for delta_net, graph in product(forms, (PLAIN, "lean")):
            yield replace(run, flash_attn=flash_attn, n_ubatch=n_ubatch, delta_net=delta_net, graph=graph)


def sweep(run: Run, ref: str, *, tolerance: float, ggml: str | None = None) -> Iterator[tuple[Run, Comparison]]:
    """Compare every variant of `run` with its reference, each in a process of its own; yields them as they are done."""
    wanted, reference = None, None
    for variant in variants(run):
        now = reference_of(ref, variant, ggml=ggml) if wanted is None or isinstance(wanted, Run) else wanted
        if now != wanted or reference is None:
            wanted, reference = now, now if isinstance(now, Recording) else record_apart(now)
        yield variant, compare(record_apart(variant), reference, tolerance=tolerance)
