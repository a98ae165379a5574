"""Every named value of the plain graph, whichever delta-net form it uses, against the reference's trace."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.graph import delta_net as delta_net_block
from qwen3next_ggml.models import qwen3next
from tests.kit import nmse, reference_of

TOKENS = np.random.default_rng(9).integers(0, 97, 70).tolist()
TOLERANCE = 1e-9
STATES = ("new_state",)
# a tensor that is named twice keeps the later name; "beta" has none in llama.cpp
UNNAMED = {*(f"post_moe-{il}" for il in range(4)), *(f"beta-{il}" for il in range(3))}
UNNAMED_UNFUSED = {f"{x}_conv_predelta-{il}" for x in "kv" for il in range(3)}


def record(path, delta_net):
    """Return the plain graph's named values in graph order, a repeated name with its last value; each over all tokens but states."""
    options = dict(n_ctx=256, type_k="f32", type_v="f32", delta_net=delta_net, graph="plain", flash_attn=False)
    batches = [[token] for token in TOKENS] if delta_net == "autoregressive" else [TOKENS]
    with qwen3next_ggml.load(path, n_threads=1) as model, model.session(**options) as s:
        recorded = [s.debug_capture({0: batch}, logits="all")[1][0] for batch in batches]
    values = [{name: value for (name, _), (_, _, value) in sorted(r.items(), key=lambda item: item[0][1])} for r in recorded]
    order = dict.fromkeys(name for name, _ in recorded[0])
    last_only = {name for name in order if name.startswith(STATES)}
    return {n: values[-1][n] if n in last_only else np.concatenate([v[n].reshape(-1) for v in values]) for n in order}


def misses(got, want):
    """Return by how much the values both sides have differ, in graph order, where they do."""
    off = {name: nmse(got[name].reshape(-1), want[name].reshape(-1)) for name in got if name in want}
    return {name: x for name, x in off.items() if not x < TOLERANCE}


@pytest.fixture(scope="module")
def trace(toys):
    trace = {}
    reference_of(toys.t0).decode(TOKENS, trace=trace)
    return trace


@pytest.mark.parametrize("delta_net", ["fused", "chunked", "autoregressive"])
def test_every_named_value(toys, trace, delta_net):
    recorded = record(toys.t0, delta_net)
    assert misses(recorded, trace) == {}
    assert trace.keys() - recorded.keys() == (UNNAMED if delta_net == "fused" else UNNAMED | UNNAMED_UNFUSED)


def test_first_miss_names_the_bug(toys, trace, monkeypatch):
    pair_heads = delta_net_block.pair_heads
    monkeypatch.setattr(qwen3next, "pair_heads", lambda g, x, H_v, pairing: pair_heads(g, x, H_v, "tiled"))
    missed = misses(record(toys.t0, "fused"), trace)
    assert next(iter(missed)) == "q_conv_predelta-0"
