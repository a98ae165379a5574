"""Listings of graphs: complete, equal to what a session runs, with costs that can be worked out by hand."""

import csv
import io
import json
import re
from xml.etree import ElementTree

import pytest

import qwen3next_ggml
from qwen3next_ggml import ggml
from qwen3next_ggml.errors import OptionError, QGraphError
from qwen3next_ggml.geometry import model_of
from qwen3next_ggml.graph.builder import GraphBuilder
from qwen3next_ggml.graph.inputs import Sizes
from qwen3next_ggml.graph.key import GraphKey
from qwen3next_ggml.graph.options import LEAN
from qwen3next_ggml.graph.support import resolve_options
from qwen3next_ggml.graph_view import outline
from qwen3next_ggml.graph_view.boxes import drawn
from qwen3next_ggml.graph_view.html import source_of
from qwen3next_ggml.graph_view.lines import LineRecorder
from qwen3next_ggml.graph_view.scopes import SCOPES
from tests.kit import run_python

FORMS = [("plain", "fused", 1), ("lean", "fused", 1), ("lean", "fused", 512), ("plain", "chunked", 512), ("lean", "autoregressive", 1)]
DIGEST = """
import hashlib, sys
import qwen3next_ggml as q
with q.load(sys.argv[1], weights=False) as m:
    from qwen3next_ggml.graph.options import LEAN
    from qwen3next_ggml.graph_view import outline
    v = outline(m, LEAN, n_tokens=3, lines=True)
text = "".join((v.to_text(), v.to_csv(), v.to_dot(), v.to_json(), v.of_layer(1).to_svg(), v.to_html()))
print(hashlib.sha256(text.encode()).hexdigest(), len(text))
"""


@pytest.fixture(scope="module")
def toy(toys):
    """The toy's metadata, without its weights."""
    with qwen3next_ggml.load(toys.t0, weights=False) as model:
        yield model


@pytest.fixture(scope="module")
def big():
    """The published shape, all 48 layers of it."""
    with model_of("qwen3-next-80b", type="q4_k") as model:
        yield model


def view_of(model, graph="lean", delta_net="fused", n_tokens=1, **options):
    resolved = resolve_options(graph, delta_net, "on", model.hparams, model.devices)
    return outline(model, resolved, n_tokens=n_tokens, **options)


def one(view, name, op=None):
    """Return the node called `name`, of one op where several are."""
    [node] = [node for node in view.nodes if node.name == name and op in (None, node.op)]
    return node


# the nodes


@pytest.mark.parametrize("graph, delta_net, n_tokens", FORMS)
def test_every_node_of_the_sessions_own_graph_is_listed(toys, graph, delta_net, n_tokens):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model, model.session(n_ctx=512, graph=graph, delta_net=delta_net) as s:
        view = s.graph(n_tokens)
        n_kv = 512 if n_tokens == 512 else 256
        built = s.graphs.build(GraphKey(Sizes(n_tokens, 1, 1, n_kv, 0), s.options))
        want = [(x.op, x.name.strip(), x.shape, x.type.name, len(x.src)) for x in built.graph.nodes]
        built.close()
        assert s.n_past() == 0 and s.n_builds == 0
    assert [(n.op, n.name, n.shape, n.type, len(n.sources)) for n in view.nodes] == want
    assert view.names == [name for _, name, *_ in want]


def test_a_file_without_weights_gives_the_same_graph(toys, toy):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model, model.session(n_ctx=256) as s:
        assert s.graph(7) == outline(toy, s.options, n_tokens=7)


def test_a_session_shows_what_it_would_run(toys):
    """After tokens more cells are looked at, rollback keeps more states, and counts outside of a ubatch are refused."""
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        with model.session(n_ctx=512, n_ubatch=64) as s:
            assert s.graph().by_id["attn_inp_kq_mask"].shape == (256,)
            s.decode(list(range(5)) * 60, logits="none")
            assert s.graph().by_id["attn_inp_kq_mask"].shape == (512,) and s.n_past() == 300
            for n in (0, 65):
                with pytest.raises(OptionError, match=f"n_tokens is {n}; this session computes 1 to 64"):
                    s.graph(n)
        with model.session(n_ctx=256, n_rollback=2) as s:
            kept = [n for n in s.graph(4).nodes if n.name.startswith("new_state-0")]
            assert kept[0].shape[-1] == 3


def test_patches_are_shown_with_the_line_they_come_from(toys):
    # a patched graph adds up a layer in several ops
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model, model.session(n_ctx=256, graph=LEAN.but(joint_sum=False)) as s:
        plain = s.graph()
        with s.patch("attn_norm-1", lambda g, x: g.scale(x, 0.5)):
            view = s.graph(lines=True)
        assert s.graph() == plain
    node = one(view, "attn_norm-1")
    assert (node.op, node.layer, node.scope, view.by_id[node.sources[0]].name) == ("SCALE", 1, "delta-net", "attn_norm-1 (before patch)")
    assert node.line.startswith("test_graph_view.py:") and node.lines[-1].startswith("models/qwen3next.py:")
    assert len(view.nodes) == len(plain.nodes) + 1


def test_decode_and_prefill_show_their_forms(toy):
    ops = {form: {node.op for node in view_of(toy, *form).nodes} for form in FORMS}
    assert {form for form in FORMS if "GATED_DELTA_NET" in ops[form]} == set(FORMS[:3])
    assert {form for form in FORMS if "SOLVE_TRI" in ops[form]} == {FORMS[3]}
    assert "TOP_K" in ops[FORMS[1]] and "TOP_K" not in ops[FORMS[0]] and "ARGSORT" in ops[FORMS[0]]
    assert view_of(toy, n_tokens=512).nodes[0].shape == (64, 512)


@pytest.mark.parametrize("graph, delta_net, n_tokens", FORMS)
def test_sources_exist_and_come_first(toy, graph, delta_net, n_tokens):
    view = view_of(toy, graph, delta_net, n_tokens)
    for part in (view, view.of_layer(1), view.of_layer(3)):
        known = {leaf.id for leaf in part.leaves}
        for node in part.nodes:
            assert known.issuperset(node.sources), node
            known.add(node.id)
        assert len(known) == len(part.nodes) + len(part.leaves) == len(part.by_id)
    kinds = {leaf.kind for leaf in view.of_layer(1).leaves}
    assert kinds - {"input"} == {"weight", "state", "outside"}
    assert {leaf.kind for leaf in view.leaves} == {"weight", "state", "input"}


def test_layers_take_the_graph_apart(toy):
    view = view_of(toy)
    assert view.layers == [0, 1, 2, 3]
    assert [n.name for n in view.nodes if n.layer is None] == ["model.embed_tokens", "norm", "result_norm", "result_output"]
    assert sum(len(view.of_layer(il).nodes) for il in view.layers) + 4 == len(view.nodes)
    assert view.of_layer(2).layer == 2 and view.of_layer(2).of_layer(2).nodes == view.of_layer(2).nodes


def test_two_processes_write_the_same(toys):
    digests = {run_python(DIGEST, toys.t0).stdout for _ in range(2)}
    assert len(digests) == 1 and int(digests.pop().split()[1]) > 100_000


# the parts of the model


@pytest.mark.parametrize("graph, delta_net, n_tokens", FORMS)
def test_what_reads_a_weight_belongs_to_its_part(toy, graph, delta_net, n_tokens):
    view = view_of(toy, graph, delta_net, n_tokens)
    for node in view.nodes:
        assert node.scope in SCOPES
        for weight in (s for s in node.sources if s.startswith("blk.")):
            _, il, name = weight.partition("+")[0].split(".", 2)  # weights multiplied at once go with the first
            mixer = "attn" if il == "3" else "delta-net"
            wanted = (
                "shared" if "_shexp" in name else "experts" if "_exps" in name else "router" if "ffn_gate_inp" in name
                else "ffn" if name.startswith("post_attention_norm") else mixer
            )  # fmt: skip
            assert (node.layer, node.scope) == (int(il), wanted), node
    norms = [n.scope for n in view.nodes if n.name == "norm-0" and n.op == "RMS_NORM"]
    assert norms == ["delta-net", "delta-net", "ffn"], "each norm of a layer goes with what reads it"
    assert one(view, "model.embed_tokens").scope == "embd" and one(view, "result_output").scope == "head"


def test_unnamed_nodes_stay_in_the_layer_they_were_emitted_in(toy):
    """Told from names; the builder knows it from the order of emission."""
    view = view_of(toy, "plain", "chunked", 65)
    ends = [next(i for i, n in enumerate(view.nodes) if n.name == f"l_out-{il}") for il in range(4)]
    for i, node in enumerate(view.nodes):
        if node.layer is not None:
            assert node.layer == sum(i > end for end in ends), node


def test_the_nextn_block_is_a_part_of_its_own(toys):
    with qwen3next_ggml.load(toys.mtp, weights=False) as model:
        view = view_of(model, mtp=True)
    assert {node.scope for node in view.nodes} == {"mtp", "head"}
    assert one(view, "mtp_eh_proj-4").scope == "mtp" and one(view, "result_output").scope == "head"
    with pytest.raises(OptionError, match="no NextN block"), model_of("tiny") as model:
        view_of(model, mtp=True)


# the costs


def test_flops_and_bytes_by_hand(big):
    hp, T = big.hparams, 7
    view = view_of(big, "plain", n_tokens=T)
    q = one(view, "Qcur_full-3", "MUL_MAT")
    assert q.flops == 2 * 2048 * 8192 * T
    assert (q.bytes_read, q.bytes_written) == (2048 * 8192 // 256 * 144 + 4 * 2048 * T, 4 * 8192 * T)
    up = one(view, "ffn_moe_up-0", "MUL_MAT_ID")
    assert up.flops == 2 * 2048 * 512 * 10 * T
    assert up.bytes_read == 10 * T * 2048 * 512 // 256 * 144 + 4 * 2048 * T + 4 * 10 * T
    [attention] = [n for n in view.of_layer(3).nodes if n.op == "FLASH_ATTN_EXT"]
    assert attention.flops == 4 * hp.n_head * hp.n_embd_head_k * 256 * T
    [delta] = [n for n in view.of_layer(0).nodes if n.op == "GATED_DELTA_NET"]
    assert delta.flops == 7 * 128 * 128 * 32 * T
    embedding = view.nodes[0]
    assert (embedding.op, embedding.flops, embedding.bytes_read) == ("GET_ROWS", 0, T * (2048 // 256 * 144) + 4 * T)
    [conv] = [n for n in view.of_layer(0).nodes if n.op == "SSM_CONV"]
    assert conv.flops == 2 * 4 * 8192 * T
    assert all(n.flops == n.bytes_read == n.bytes_written == n.barriers == 0 for n in view.nodes if n.kind == "view")


def test_every_expert_is_read_once_when_many_tokens_pick(big):
    up = one(view_of(big, n_tokens=512), "ffn_moe_up-0", "MUL_MAT_ID")
    assert up.bytes_read == 512 * 2048 * 512 // 256 * 144 + 4 * 2048 * 512 + 4 * 10 * 512


def test_kernels_and_barriers_as_upstream_counts_them(big):
    """Worked out from llama.cpp's source for one recurrent layer: 63 executed, 3 of them fused, 13 products and the delta rule wait inside.

    llama.cpp's own graph has 6 nodes without elements more.
    """
    stats = view_of(big, "plain").of_layer(1).stats()
    assert (stats["executed"], stats["kernels"], stats["barriers"]) == (63, 60, 73)
    for graph in ("plain", "lean"):
        view = view_of(big, graph)
        inside = sum(n.op in ("MUL_MAT", "MUL_MAT_ID", "GATED_DELTA_NET", "OUT_PROD", "FLASH_ATTN_EXT") for n in view.nodes)
        stats = view.stats()
        assert stats["barriers"] == stats["kernels"] + inside
        for key in ("by_scope", "by_op"):
            for what in ("nodes", "executed", "kernels", "barriers", "bytes_read", "bytes_written", "flops"):
                assert sum(group[what] for group in stats[key]) == stats[what]


# the Python lines


def test_lines_lead_to_the_op(toy):
    view = view_of(toy, lines=True)
    ops = ("MUL_MAT", "MUL_MAT_ID", "RMS_NORM", "GATED_DELTA_NET", "SSM_CONV", "TOP_K", "OUT_PROD", "SET_ROWS", "SIGMOID", "SOFTPLUS")
    seen = set()
    for node in view.nodes:
        assert node.lines and node.lines[-1].startswith("models/qwen3next.py:"), node
        if node.op in ops:
            assert f"g.{node.op.lower()}(" in source_of(node.line), node
            seen.add(node.op)
    assert seen == set(ops)
    assert [line.split(":")[0] for line in one(view, "attn_norm-0").lines] == ["graph/norm.py", "models/qwen3next.py"]


def test_lines_cost_nothing_unless_wanted(toy):
    assert all(node.lines == () for node in view_of(toy).nodes)
    assert GraphBuilder.mul_mat is ggml.Ops.mul_mat and LineRecorder.mul_mat is not ggml.Ops.mul_mat


# the ways to write it


def test_model_explorer_reads_the_json(toy):
    view = view_of(toy, lines=True)
    document = json.loads(view.to_json())
    # its loader takes an object with a label and graphs
    assert document["label"] and len(document["graphs"]) == 1
    nodes = document["graphs"][0]["nodes"]
    by_id = {node["id"]: node for node in nodes}
    assert len(by_id) == len(nodes) == len(view.nodes) + len(view.leaves)
    for node in nodes:
        assert all(isinstance(node[key], str) for key in ("id", "label", "namespace"))
        assert all(isinstance(a["key"], str) and isinstance(a["value"], str) for a in node["attrs"])
        assert all(edge["sourceNodeId"] in by_id for edge in node["incomingEdges"])
        assert {"name", "op", "type", "shape", "device", "scope"} <= {a["key"] for a in node["attrs"]}
    assert by_id[one(view, "l_out-2").id]["namespace"] == "layer 2/ffn"
    assert [edge["sourceNodeId"] for edge in by_id["1"]["incomingEdges"]] == ["0"]


def test_dot_has_every_node_and_edge(toy):
    view = view_of(toy).of_layer(1)
    text = view.to_dot()
    quoted = r'"(?:[^"\\]|\\.)*"'
    bare = re.sub(quoted, "Q", text)
    assert bare.count("{") == bare.count("}") and '"' not in bare
    edges = re.findall(rf"^  ({quoted}) -> ({quoted});$", text, re.M)
    assert [(json.loads(a), json.loads(b)) for a, b in edges] == [(s, n.id) for n in view.nodes for s in n.sources]
    declared = {json.loads(name) for name in re.findall(rf"^ +({quoted}) \[label=", text, re.M)}
    assert declared == set(view.by_id)


@pytest.mark.parametrize("graph, delta_net, n_tokens", FORMS)
def test_a_drawn_layer_is_in_order(toy, graph, delta_net, n_tokens):
    view = view_of(toy, graph, delta_net, n_tokens).of_layer(1)
    found = drawn(view)
    rects = [(x, y, x + box.size[0], y + box.size[1]) for box, (x, y) in zip(found.boxes, found.placed.corners)]
    for i, a in enumerate(rects):
        assert 0 <= a[0] and a[2] <= found.placed.width + 0.2 and a[3] <= found.placed.height + 0.2
        assert not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for b in rects[:i])
    for a, b, points in found.placed.edges:
        assert points[0][1] == pytest.approx(rects[a][3], abs=0.2) and points[-1][1] == pytest.approx(rects[b][1], abs=0.2)
        assert [y for _, y in points] == sorted(y for _, y in points)
    root = ElementTree.fromstring(view.to_svg())
    drawn_ids = [g.get("id") for g in root.iter("{http://www.w3.org/2000/svg}g") if g.get("id")]
    assert drawn_ids == [f"n{n.id}" for n in view.nodes if n.kind == "kernel"]


def test_a_cast_is_drawn(toys):
    """ggml lists a cast among its own sources, as where it writes."""
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model, model.session(n_ctx=256, graph="plain", type_k="f32", type_v="f32") as s:
        layer = s.graph(5).of_layer(3)
    casts = [node for node in layer.nodes if node.op == "CPY" and node.name.endswith("(copy)")]
    assert [len(node.sources) for node in casts] == [1, 1] and all(node.id not in node.sources for node in layer.nodes)
    assert layer.to_svg().count("(copy)") == 2


def test_the_text_of_one_layer_names_its_sources(toy):
    text = view_of(toy, "plain", lines=True).of_layer(3).to_text().splitlines()
    [line] = [line for line in text if " MUL_MAT " in line and " Kcur-3 " in line]
    assert "blk.3.attn_k.weight, attn_norm-3" in line and "graph/linear.py:" in line and " f32 " in line


def test_csv_has_a_row_per_node(toy):
    view = view_of(toy, lines=True)
    rows = list(csv.DictReader(io.StringIO(view.to_csv())))
    assert [(row["id"], row["name"], row["op"], int(row["FLOPs"]), row["made by"]) for row in rows] == [
        (n.id, n.name, n.op, n.flops, n.line) for n in view.nodes
    ]


def test_a_model_without_a_file_makes_no_session(big):
    with pytest.raises(QGraphError):
        big.session(n_ctx=256)
