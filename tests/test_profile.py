"""Times of nodes: that they are those of the graph, add up, and computing one by one computes the same."""

import json
from collections import Counter
from statistics import median
from time import perf_counter, thread_time

import numpy as np
import pytest

import qwen3next_ggml as q
import qwen3next_ggml.profile as profile_module
from qwen3next_ggml.errors import OptionError
from qwen3next_ggml.profile import _Watch, _watched, profile, read_bandwidth

TOKENS = np.random.default_rng(3).integers(0, 97, 40).tolist()


@pytest.fixture(scope="module")
def model(toys):
    with q.load(toys.t0, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def found(model):
    return profile(model, n_prompt=48, n_gen=6, n_ctx=256)


def test_one_by_one_computes_the_same(model):
    with model.session(n_ctx=256, n_ubatch=16) as s:
        want = s.decode(TOKENS, logits="all"), s.decode([5])
        s.clear()
        with _watched(s) as watch:
            watch.apart = True
            got = s.decode(TOKENS, logits="all"), s.decode([5])
            assert len(watch.spans) == sum(node.kind != "view" for node in s.graph(1).nodes)
        # a norm and the product after it are one kernel in a whole graph, which may round otherwise
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(got, want))
        s.clear()
        assert np.array_equal(s.decode(TOKENS, logits="all"), want[0])


def test_the_nodes_are_those_of_the_graph(model, found):
    assert [(one.what, one.n_tokens) for one in found.passes] == [("prompt", 48), ("step", 1)]
    with model.session(n_ctx=256) as s:
        for one in found.passes:
            view = s.graph(one.n_tokens)
            assert [t.node for t in one.nodes] == [node for node in view.nodes if node.kind != "view"]
            assert Counter(share.name for share in one.by("op")) == Counter({t.node.op: 1 for t in one.nodes})
            assert one.all.flops == view.stats()["flops"] and one.all.n_nodes == len(one.nodes)


def test_the_parts_add_up(found):
    """Scopes and ops are the nodes; nodes and calls are what running them apart took."""
    for one in found.passes:
        for key in ("scope", "op"):
            assert sum(share.seconds for share in one.by(key)) == pytest.approx(one.total)
        assert one.total + found.call * len(one.nodes) == pytest.approx(one.apart)


def test_a_call_takes_no_longer_than_the_shortest_node(model, monkeypatch):
    """It is timed beforehand, maybe in a spell in which everything took longer."""
    monkeypatch.setattr(profile_module._Watch, "_cost_of_a_call", lambda self: 1.0)
    found = profile_module.profile(model, n_prompt=0, n_gen=2, n_ctx=256)
    seconds = [timed.seconds for timed in found.passes[0].nodes]
    assert found.call < 1 and min(seconds) == 0 and sum(seconds) > 0


def test_the_sum_is_what_the_clock_says(bard):
    """Within 10 % of the wall time around a whole decode, which also plans, fills and fetches."""
    with q.load(bard, n_threads=1) as model, model.session(n_ctx=256) as s, _watched(s) as watch:
        watch.apart = True
        parts = []
        for _ in range(4):
            s.clear()
            start = perf_counter()
            s.decode([1] * 96)
            parts.append(sum(watch.spans) / (perf_counter() - start))
        assert 0.9 < max(parts) and all(part <= 1 for part in parts)


@pytest.fixture
def own_time(monkeypatch):
    """One thread's CPU time instead of the clock's: what other processes take is neither in the parts nor in the whole."""
    monkeypatch.setattr(profile_module, "perf_counter", thread_time)


def ratios(bard, n):
    """Nodes without their calls against the graph in one call, of n profiles."""
    with q.load(bard, n_threads=1) as model:
        for _ in range(n):
            [one] = profile(model, n_prompt=64, n_gen=0, n_ctx=256).passes
            yield one.total / one.whole


def test_the_parts_are_the_whole(bard, own_time):
    """Within 10 %, as far as the machine lets two runs be alike."""
    found = []
    for ratio in ratios(bard, 9):
        found.append(ratio)
        if len(found) > 2 and abs(median(found) - 1) < 0.1:
            return
    raise AssertionError(found)


def test_a_scope_that_is_left_out_is_missed(bard, own_time, monkeypatch):
    spans = _Watch._spans

    def without_experts(self, nodes):
        return [0.0 if node.op == "MUL_MAT_ID" else span for node, span in zip(nodes, spans(self, nodes))]

    monkeypatch.setattr(_Watch, "_spans", without_experts)
    assert median(ratios(bard, 5)) < 0.9


def test_longer_prompts_take_longer(model):
    few, many = (profile(model, n_prompt=n, n_gen=0, n_ctx=256).passes[0] for n in (2, 200))
    assert many.total > 3 * few.total and many.whole > 3 * few.whole


def test_memory_is_read_at_some_speed(model):
    with model.session(n_ctx=256) as s:
        assert 1e8 < read_bandwidth(s.graphs.executor.backend) < 1e12


def test_a_chrome_trace(found):
    document = json.loads(found.chrome_trace())
    passes = [event for event in document["traceEvents"] if event["cat"] == "pass"]
    nodes = [event for event in document["traceEvents"] if event["cat"] != "pass"]
    assert len(passes) == 2 and len(nodes) == sum(len(one.nodes) for one in found.passes)
    assert document["displayTimeUnit"] == "ms"
    # the fields that Chrome and Perfetto read, of the types they want; times in microseconds
    fields = {"name": str, "cat": str, "ph": str, "ts": float, "dur": float, "pid": int, "tid": int, "args": dict}
    for event in document["traceEvents"]:
        assert {key: type(value) for key, value in event.items()} == fields and event["name"]
        assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 and event["tid"] == (event["cat"] != "pass")
    assert all(event["args"].keys() == {"op", "layer", "shape", "type", "bytes", "flops"} for event in nodes)
    assert sum(event["dur"] for event in nodes) == pytest.approx(1e6 * sum(one.total for one in found.passes))
    ends = [event["ts"] + event["dur"] for event in nodes]
    assert all(after["ts"] == pytest.approx(end) for end, after in zip(ends, nodes[1:]))
    assert ends[-1] == pytest.approx(passes[1]["ts"] + passes[1]["dur"])
    assert {event["cat"] for event in nodes} == {share.name for one in found.passes for share in one.by("scope")}


@pytest.mark.parametrize(
    "given, says",
    [
        ({"n_prompt": 0, "n_gen": 0}, "at least one of either is needed"),
        ({"n_prompt": 65, "n_gen": 0, "n_ubatch": 64}, "65 tokens, an ubatch has at most 64"),
    ],
)
def test_what_is_refused(model, given, says):
    with pytest.raises(OptionError, match=says):
        profile(model, n_ctx=256, **given)
