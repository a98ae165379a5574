"""Reading changes nothing: the same bits with every node captured, on every path, whatever else the session does meanwhile."""

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import ggml, graph_cache
from qwen3next_ggml.graph.options import FAST_OPTIONS, LEAN, PLAIN
from qwen3next_ggml.parity.recording import is_named
from tests.kit import halves, same

TEXT = np.random.default_rng(31).integers(0, 97, 400).tolist()
DELTA_NETS, GRAPHS, FLASH = ("fused", "chunked", "autoregressive"), ("plain", "lean"), (True, False)
PATHS = list(product(DELTA_NETS, GRAPHS, FLASH))
# over the border of a ubatch, single tokens, several sequences of different lengths, slots that do not lie side by side
STEPS = [{0: 40}, {0: 1}, {0: 1}, {0: 9, 1: 20}, {1: 1, 0: 1}, {2: 5, 0: 3}, {0: 2}]
FILES = {"f32": {}, "q8_0": dict(type="q8_0"), "q4_k": dict(type="q4_k", geometry="tiny-q")}


@pytest.fixture(scope="module")
def models(toys):
    loaded = {name: qwen3next_ggml.load(toys.file(**how), n_threads=1) for name, how in FILES.items()}
    yield loaded
    for model in loaded.values():
        model.close()


def session(model, delta_net="fused", graph="lean", flash_attn=False, **more):
    return model.session(n_ctx=512, n_ubatch=16, n_seq_max=3, delta_net=delta_net, graph=graph, flash_attn=flash_attn, **more)


def run(s, steps=STEPS, captured=lambda i: False, patterns=("*",), want="all"):
    """Decode the steps, those that `captured` says with the patterns captured → logits of every step."""
    out = []
    for i, step in enumerate(steps):
        with s.capture(*patterns) if captured(i) else nullcontext():
            batch = {seq: TEXT[s.n_past(seq) : s.n_past(seq) + n] for seq, n in step.items()}
            # one token of one sequence goes the short way where nobody looks
            rows = {0: s.decode(batch[0], logits=want)} if batch.keys() == {0} else s.decode_batch(batch, logits=want)
            out += [np.concatenate(list(rows.values()))]
    return out


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def options_of(model, *patterns, **how):
    """The options that capturing leaves on."""
    with session(model, **how) as s, s.capture(*patterns):
        return s.probes.key(s.probes.base).options


@pytest.mark.parametrize("n_rollback", [0, 4])
@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_capturing_everything_changes_no_bit(models, delta_net, graph, flash_attn, n_rollback):
    model, how = models["f32"], dict(flash_attn=flash_attn, delta_net=delta_net)
    options = options_of(model, "*", graph=graph, **how)
    more = how | dict(n_rollback=n_rollback)
    with session(model, graph=options, **more) as quiet, session(model, graph=graph, **more) as s:
        want = run(quiet)
        assert equal(run(s, captured=lambda i: True), want)
        assert all(same(halves(s, seq), halves(quiet, seq)) for seq in range(3))
        for x in (quiet, s) if n_rollback else ():
            x.rewind(n=3)
        assert equal(run(s, [{0: 5}, {0: 1}], captured=lambda i: True), run(quiet, [{0: 5}, {0: 1}]))


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_capturing_what_there_is_switches_nothing_off(models, delta_net, graph, flash_attn):
    """`debug_capture` reads a graph as it is, fast options and all."""
    how = dict(delta_net=delta_net, graph=graph, flash_attn=flash_attn)
    with session(models["f32"], **how) as quiet, session(models["f32"], **how) as s:
        for step in STEPS:
            batch = {seq: TEXT[s.n_past(seq) : s.n_past(seq) + n] for seq, n in step.items()}
            got, want = s.debug_capture(batch, logits="all")[0], quiet.decode_batch(batch, logits="all")
            assert all(np.array_equal(got[seq], want[seq]) for seq in batch)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("delta_net, graph", list(product(("fused", "chunked"), GRAPHS)))
def test_capturing_for_a_while(models, name, delta_net, graph):
    """On and off and on again inside one session, also between single tokens, whose graph is kept ready; any weights."""
    model, how = models[name], dict(delta_net=delta_net)
    options = options_of(model, "*", graph=graph, **how)
    steps = [*STEPS, *[{0: 1}] * 9]
    with session(model, graph=options, **how) as quiet, session(model, graph=options, **how) as s:
        for want in ("all", "last"):
            assert equal(run(s, steps, lambda i: i % 4 in (1, 2) or i > 10, want=want), run(quiet, steps, want=want))
        assert all(same(halves(s, seq), halves(quiet, seq)) for seq in range(3))


@pytest.mark.parametrize("patterns", [
    ("attn_norm-*",), ("a_softplus-*", "z-1", "attn_residual-0"), ("v_conv_predelta-2", "Kcur-3", "conv_states-0"),
], ids=" ".join)  # fmt: skip
def test_nodes_that_are_there_anyway_cost_no_option(models, patterns):
    """Captured for a while in the lean graph, between steps of the lean graph."""
    model = models["f32"]
    assert options_of(model, *patterns) == options_of(model, "attn_norm-0")
    with session(model) as quiet, session(model) as s:
        assert s.options != PLAIN and options_of(model, *patterns) == s.options
        steps = [*STEPS, *[{0: 1}] * 4]
        assert equal(run(s, steps, lambda i: i % 2, patterns, want="last"), run(quiet, steps, want="last"))


def test_the_fast_graph_is_back_after_a_capture(models):
    with session(models["f32"]) as s, session(models["f32"]) as quiet:
        run(s, captured=lambda i: i == 3)
        want = run(quiet)
        assert s.probes.key(s.probes.base).options == s.options and not any(key.captures for key in s.graphs._graphs)
        # the captured step took the plain graph, which rounds otherwise
        assert np.allclose(run(s, [{0: 5}])[0], run(quiet, [{0: 5}])[0], atol=1e-4) and len(want) == len(STEPS)


@pytest.mark.parametrize("name", FAST_OPTIONS)
def test_every_fast_option_survives_what_it_leaves_alone(models, name):
    """One fast option by itself: what it does not touch is read without it being switched off, what it does with the plain value."""
    model = models["f32"]
    alone = PLAIN.but(**{name: getattr(LEAN, name)})
    with session(model, graph=alone) as s, session(model, graph=PLAIN) as plain:
        with s.capture("attn_norm-0"):
            run(s)
            assert s.probes.key(s.probes.base).options == alone
        with s.capture("*") as t, plain.capture("*") as want:
            s.clear(), plain.clear()
            s.decode(TEXT[:9], logits="all"), plain.decode(TEXT[:9], logits="all")
        names = {name for name in want if is_named(name)}
        assert names <= set(t)
        # where V goes is a matter of the cache, which is made for the options of the session
        assert all(t[name].shape == want[name].shape for name in names - {"attn_inp_v_idxs"})


@pytest.mark.parametrize("graph", GRAPHS)
def test_over_two_devices_too(models, toys, graph):
    """Through the scheduler, which places a graph anew for each run: the same logits, and the values of one device."""
    with session(models["f32"], graph=graph) as one, one.capture("*") as want:
        run(one, STEPS[:3])
    with qwen3next_ggml.load(toys.t0, device=["CPU", "CPU"], n_threads=1) as model:
        with session(model, graph=one.options) as quiet, session(model, graph=graph) as s, s.capture("*") as got:
            assert np.allclose(run(s, STEPS[:3])[-1], run(quiet, STEPS[:3])[-1], atol=1e-5)
        for name in filter(is_named, want):
            assert np.allclose(got[name], want[name], atol=1e-4, equal_nan=True), name


def writing(g, graph, wanted):
    """A capture that writes into a node on the way: by one part in ten thousand."""
    out = ggml.Graph(g.context, graph.n_nodes + 8)
    for node in graph.nodes:
        out.expand(node)
        if node.name == "l_out-1":
            out.expand(g.scale_inplace(node, 1.0001))
    return out, {}


def test_a_capture_that_writes_is_noticed(models, monkeypatch):
    how = dict(delta_net="fused", graph="plain")
    with session(models["f32"], **how) as quiet, session(models["f32"], **how) as s:
        want = run(quiet)
        with s.capture("l_out-1"):
            monkeypatch.setattr(graph_cache, "capture", writing)
            assert not equal(run(s), want)
