"""Ask devices whether they run the fused ops, have those that are not the CPU prove it, and settle "auto" (level 5)."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from .. import ggml
from ..errors import BackendError, OptionError
from ..ggml import types
from .options import DELTA_NETS, LEAN, PLAIN, GraphOptions
from .own import Graph

# kernels round in their own ways; one that is wrong is off by the size of the values
PROOF_LIMIT = 1e-3
# where attention is much of a step; below, llama.cpp's own op keeps to its text even in rounding
LONG_CONTEXT = 8192


def resolve_options(
    graph: str | GraphOptions, delta_net: str, flash_attn: bool | str, hp, devices: Sequence[ggml.Device], *,
    n_ctx: int = LONG_CONTEXT,
) -> GraphOptions:  # fmt: skip
    """Return the options that "auto", "plain" or "lean" and the two choices of op mean on these devices, in a context of `n_ctx`."""
    if isinstance(graph, GraphOptions):
        return graph
    # GPUs fuse the node order of llama.cpp's own graph
    on_gpu = PLAIN.but(finite_kv=True)
    named = {"plain": PLAIN, "lean": LEAN, "auto": LEAN if all(d.kind == "cpu" for d in devices) else on_gpu}
    if graph not in named:
        raise OptionError(f"graph must be one of {', '.join(named)}, got {graph!r}")
    options = named[graph] if n_ctx >= LONG_CONTEXT else named[graph].but(grouped_attn=False)
    return options.but(
        delta_net=resolve_delta_net(delta_net, hp, devices), flash_attn=resolve_flash_attn(flash_attn, hp, devices)
    )


def resolve_delta_net(wanted: str, hp, devices: Sequence[ggml.Device]) -> str:
    """Return the delta-net form to use: "auto" is the fused op where every device has it, else the chunked form."""
    if wanted not in ("auto", *DELTA_NETS):
        raise OptionError(f"delta_net must be one of auto, {', '.join(DELTA_NETS)}, got {wanted!r}")
    if wanted not in ("auto", "fused"):
        return wanted
    lacking = [d.name for d in devices if not _has_gated_delta_net(d, hp)]
    if lacking and wanted == "fused":
        raise BackendError(f"{', '.join(lacking)}: no gated_delta_net op that is right for this model; use delta_net='chunked'")
    return "chunked" if lacking else "fused"


def resolve_flash_attn(wanted: bool | str, hp, devices: Sequence[ggml.Device]) -> bool:
    """Return whether to use flash attention: "auto" is yes where every device has it for this head width."""
    choices = {True: True, False: False, "on": True, "off": False, "auto": None}
    if wanted not in choices:
        raise OptionError(f"flash_attn must be on, off or auto, got {wanted!r}")
    use = choices[wanted]
    if use is False:
        return False
    lacking = [d.name for d in devices if not _has_flash_attn(d, hp)]
    if lacking and use:
        raise BackendError(f"{', '.join(lacking)}: no flash attention that is right for head width {hp.n_embd_head_k}")
    return not lacking


def _has_gated_delta_net(device: ggml.Device, hp) -> bool:
    S, H = hp.ssm_d_state, hp.ssm_dt_rank
    with ggml.Context(16) as ctx:
        g = ggml.Ops(ctx)
        qkv = [ctx.new_tensor(types.F32, S, H, 4, 1) for _ in range(3)]
        gate, beta = (ctx.new_tensor(types.F32, 1, H, 4, 1) for _ in range(2))
        claimed = device.supports_op(g.gated_delta_net(*qkv, gate, beta, ctx.new_tensor(types.F32, S, S, H, 1), 1))
    return claimed and _proves(device, _delta_net, S, H)


def _has_flash_attn(device: ggml.Device, hp) -> bool:
    D, H, H_kv = hp.n_embd_head_k, hp.n_head, hp.n_head_kv
    with ggml.Context(16) as ctx:
        g = ggml.Ops(ctx)
        q = ctx.new_tensor(types.F32, D, 4, H, 1)
        k, v = (ctx.new_tensor(types.F16, D, 256, H_kv, 1) for _ in range(2))
        mask = ctx.new_tensor(types.F16, 256, 4, 1, 1)
        claimed = device.supports_op(g.flash_attn_ext(q, k, v, mask, D**-0.5, 0.0, 0.0))
    return claimed and _proves(device, _attention, D, H, H_kv)


def _proves(device: ggml.Device, build: Callable, *sizes: int) -> bool:
    """Say whether a device gets an op right, for one token and for several; backends claim ops they get wrong."""
    return device.kind == "cpu" or all(_agrees(device, build, *sizes, n_tokens) for n_tokens in (1, 4))


@lru_cache(maxsize=64)
def _agrees(device: ggml.Device, build: Callable, *sizes: int) -> bool:
    values = []
    for name in (device.name, "CPU"):
        with Graph(device=name, n_threads=1) as g:
            values.append(g.compute(build(g, np.random.default_rng(sizes), *sizes)).astype(np.float64))
    got, want = values
    return bool(((got - want) ** 2).sum() <= PROOF_LIMIT * (want**2).sum())


def _delta_net(g: Graph, rng: np.random.Generator, S: int, H: int, n_tokens: int) -> ggml.Tensor:
    qkv = [g.tensor(rng.normal(size=(1, n_tokens, H, S)) / S**0.5) for _ in range(3)]
    gate, beta = g.tensor(-rng.uniform(size=(1, n_tokens, H, 1))), g.tensor(rng.uniform(size=(1, n_tokens, H, 1)))
    return g.gated_delta_net(*qkv, gate, beta, g.tensor(rng.normal(size=(1, H, S, S))), 1)


def _attention(g: Graph, rng: np.random.Generator, D: int, H: int, H_kv: int, n_tokens: int) -> ggml.Tensor:
    q = g.tensor(rng.normal(size=(1, H, n_tokens, D)))
    k, v = (g.tensor(rng.normal(size=(1, H_kv, 256, D)), dtype="f16") for _ in range(2))
    mask = np.where(np.arange(256) < 200 + np.arange(n_tokens)[:, None], 0, -np.inf)
    return g.flash_attn_ext(q, k, v, g.tensor(mask, dtype="f16"), D**-0.5, 0.0, 0.0)
