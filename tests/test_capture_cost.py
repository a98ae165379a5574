"""What reading one value costs a decode step: nothing in the graph, or one copy; and a graph is built once."""

import json
import os

import pytest

import qwen3next_ggml as q
from benchmarks import capture as benchmark

STEPS = 20
# a node is read where it is; a view, or what a later node overwrites, through one copy of its own size
IN_PLACE = ("l_out-1", "attn_norm-0", "ffn_moe_swiglu-2", "conv_output_silu-0", "linear_attn_out-2")
THROUGH_A_COPY = ("ffn_moe_down-2", "v_conv_predelta-1", "conv_states-0", "Qcur_view-3", "gate-3", "linear_attn_qkv_mixed-1")


@pytest.fixture(scope="module")
def model(toys):
    with q.load(toys.t0, n_threads=1) as model:
        yield model


def last_built(session):
    return next(reversed(session.graphs._graphs.values()))


def cost(built):
    """The nodes of a graph and the bytes of their values."""
    return len(built.graph.nodes), sum(node.nbytes for node in built.graph.nodes)


@pytest.fixture(scope="module")
def quiet(model):
    with model.session(n_ctx=256) as s:
        s.decode([1, 2, 3])
        s.decode([4])
        return cost(last_built(s))


@pytest.mark.parametrize("name, n_copies", [*((name, 0) for name in IN_PLACE), *((name, 1) for name in THROUGH_A_COPY)])
def test_one_value_is_one_copy_at_most(model, quiet, name, n_copies):
    """No option is given up, the graph is built once, and the buffer does not grow from step to step."""
    with model.session(n_ctx=256) as s:
        s.decode([1, 2, 3])
        with s.capture(name) as t:
            s.decode([4])
            n_builds, nbytes = s.n_builds, s.graphs.executor.nbytes
            for i in range(STEPS):
                s.decode([i])
            assert (s.n_builds, s.graphs.executor.nbytes) == (n_builds, nbytes) and t[name].size
            assert s.probes.key(s.probes.base).options == s.options
            built = last_built(s)
            [(node, value)] = built.kept.values()
            assert (value != node) == bool(n_copies)
            assert cost(built) == (quiet[0] + n_copies, quiet[1] + n_copies * value.nbytes) and value.nbytes == 4 * node.nelements


def test_what_options_hide_costs_those_options_alone(model, quiet):
    for name, hidden in (("ffn_moe_probs-1", ("top_k_first",)), ("new_state-2", ("state_in_place", "heads_as_seqs"))):
        with model.session(n_ctx=256) as s, s.capture(name):
            assert s.probes.key(s.probes.base).options == s.options.but(**dict.fromkeys(hidden, False))
    # more is not less: everything at once is seen by the same measure
    with model.session(n_ctx=256) as s, s.capture("*"):
        s.decode([1])
        assert cost(last_built(s))[0] > quiet[0] + 50


def test_the_benchmark_prints_its_rows(capsys):
    provider = os.environ.get("QGRAPH_GGML") or "ggml_python"
    assert benchmark.main(["-n", "2", "-r", "1", "-t", "1", "--capture", "z-0", "--provider", provider]) == 0
    *lines, document = capsys.readouterr().out.splitlines()
    rows = json.loads(document)["rows"]
    assert [line.split()[0].rstrip(",") for line in lines] == ["nothing", *(row["capture"][0] for row in rows[1:])] and len(rows) == 6
    assert all(len(row["ratios"]) == 2 and row["milliseconds_without"] > 0 for row in rows)
