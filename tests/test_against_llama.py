"""The plain graph against llama.cpp on the same file: logits, every node it names, and greedy text.

With provider llama_cpp both sides run the same libggml, so a difference is the graph; with ggml-python's the kernels differ too.
"""

import os
from dataclasses import dataclass

import numpy as np
import pytest

import qwen3next_ggml
from tests.kit import assert_same_greedy, nmse, read_arrays, read_metadata, top2_gap, write_gguf
from tests.kit.llama_api import LlamaOptions, Node
from tests.kit.llama_child import LlamaJob, run_llama

SAME_LIBGGML = os.environ.get("QGRAPH_GGML") == "llama_cpp"
N_SEQ_MAX = 2


@dataclass(frozen=True)
class Scenario:
    """Batches decoded one after the other, each {sequence: number of tokens}."""
    batches: tuple[dict[int, int], ...]
    n_ubatch: int = 512


SCENARIOS = {
    "1": Scenario(({0: 1}, {0: 1})),
    "5": Scenario(({0: 5}, {0: 1})),
    "70": Scenario(({0: 70}, {0: 1}, {0: 3})),
    "70-in-ubatches-of-33": Scenario(({0: 70}, {0: 1}), n_ubatch=33),
    "two-sequences": Scenario(({0: 7, 1: 7}, {0: 1, 1: 1}, {1: 4})),
    "two-sequences-of-different-length": Scenario(({0: 9, 1: 4}, {0: 1, 1: 1})),
}


def tokens_of(scenario, n_vocab):
    """The tokens of each batch: [{seq: ids}]."""
    rng = np.random.default_rng(11)
    return [{seq: rng.integers(0, n_vocab, n).tolist() for seq, n in batch.items()} for batch in scenario.batches]


def llama_steps(batches):
    """The same batches as llama.cpp's (token, position, sequence, wanted), all logits wanted."""
    n_past, steps = {}, []
    for batch in batches:
        step = []
        for seq, ids in batch.items():
            start = n_past.setdefault(seq, 0)
            step += [(token, start + i, seq, True) for i, token in enumerate(ids)]
            n_past[seq] += len(ids)
        steps.append(tuple(step))
    return tuple(steps)


def is_named(name):
    """Whether the model's author gave this name: ggml numbers the rest, or derives it from its source ("x (view)")."""
    return not name.startswith(("node_", "leaf_")) and " (" not in name


def compare_values(name, ours, theirs, limit):
    """What is wrong with a value, or None. Top-k are sets; -inf masks must lie in the same places."""
    # slots are addresses in memories laid out differently; what was gathered from them has names of its own
    if name == "rs_s_copy":
        return None
    if "topk" in name or "argsort" in name:
        return None if np.array_equal(np.sort(ours, -1), np.sort(theirs, -1)) else "another set of experts"
    finite = np.isfinite(theirs)
    if np.isnan(ours).any() or not np.array_equal(np.where(finite, 0, theirs), np.where(np.isfinite(ours), 0, ours)):
        return "NaN or infinity in other places"
    error = nmse(ours[finite], theirs[finite])
    return None if error <= limit else f"NMSE {error:.2e}, limit {limit:.0e}"


def compare_nodes(ours, theirs, limit):
    """Join two recordings of one graph on (name, occurrence); returns one line per difference.

    ours: (name, occurrence) -> (op, ne, array); theirs: list of Node.
    """
    ours = {key: value for key, value in ours.items() if is_named(key[0])}
    theirs = {(n.name, n.occurrence): n for n in theirs if is_named(n.name)}
    lines = [f"{name} #{occurrence}: only in ours" for name, occurrence in sorted(ours.keys() - theirs.keys())]
    for (name, occurrence), node in theirs.items():
        where = f"{name} #{occurrence}"
        if (name, occurrence) not in ours:
            lines.append(f"{where}: only in llama.cpp, {node.op} {node.ne}")
            continue
        op, ne, array = ours[name, occurrence]
        if (op, tuple(ne)) != (node.op, node.ne):
            lines.append(f"{where}: ours {op} {tuple(ne)}, llama.cpp's {node.op} {node.ne}")
        elif node.array.size and (wrong := compare_values(name, array.reshape(node.array.shape), node.array, limit)):
            lines.append(f"{where}: {wrong}")
    return lines


def record_ours(session, batches):
    """Decode batches with every node captured: ({seq: logits} per batch, nodes per ubatch)."""
    logits, ubatches = [], []
    for batch in batches:
        rows, recorded = session.debug_capture(batch, logits="all")
        logits.append(rows)
        ubatches += recorded
    return logits, ubatches


def ubatches_of(nodes):
    """Nodes of a child's result, one list per graph run."""
    runs = {}
    for node in nodes:
        runs.setdefault((node.step, node.ubatch), []).append(node)
    return [runs[key] for key in sorted(runs)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory, bard, toys):
    """toy and bard: the files whose nodes are compared; embedded: bard as it is shipped, in Q8_0.

    Q8_0 products round activations to 8 bits, which turns a last-bit difference between two libggml into a visible step, so
    there bard is compared as F32.
    """
    compared = bard
    if not SAME_LIBGGML:
        compared = tmp_path_factory.mktemp("bard") / "bard.gguf"
        write_gguf(compared, read_metadata(bard), read_arrays(bard))
    return {"toy": str(toys.t0), "bard": str(compared), "embedded": str(bard)}


@pytest.fixture(scope="module")
def models(paths):
    loaded = {name: qwen3next_ggml.load(path, n_threads=2) for name, path in paths.items()}
    yield loaded
    for model in loaded.values():
        model.close()


NODE_LIMIT = 1e-6
# a 4-bit cache rounds to steps of 1/15 of a block's range: a last-bit difference between two libggml may fall on another step
CACHE_LIMIT = 1e-6 if SAME_LIBGGML else 1e-4


@pytest.mark.parametrize("flash_attn", [False, True], ids=["fa-off", "fa-on"])
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
@pytest.mark.parametrize("name", ["toy", "bard"])
def test_plain_graph_is_llamas_graph(paths, models, name, scenario, flash_attn):
    model = models[name]
    batches = tokens_of(scenario, model.hparams.n_vocab)
    # one thread: node by node, two would mostly wait for each other
    options = LlamaOptions(n_ubatch=scenario.n_ubatch, n_seq_max=N_SEQ_MAX, flash_attn=flash_attn, n_threads=1)
    theirs = run_llama(LlamaJob(model=paths[name], steps=llama_steps(batches), capture=("*",), options=options))
    with model.session(n_ctx=options.n_ctx, n_seq_max=N_SEQ_MAX, n_ubatch=scenario.n_ubatch, graph="plain", delta_net="fused",
                       flash_attn=flash_attn, type_k="f32", type_v="f32", n_threads=1) as session:
        logits, ubatches = record_ours(session, batches)
    for i, (rows, want) in enumerate(zip(logits, theirs.logits, strict=True)):
        assert nmse(np.concatenate([rows[seq] for seq in batches[i]]), want) <= NODE_LIMIT, f"logits of batch {i}"
    runs = ubatches_of(theirs.nodes)
    assert len(ubatches) == len(runs)
    for i, (ours, run) in enumerate(zip(ubatches, runs)):
        differences = compare_nodes(ours, run, NODE_LIMIT)
        assert not differences, f"ubatch {i}:\n" + "\n".join(differences)


@pytest.mark.parametrize("type_kv", ["f16", "bf16", "q8_0", "q4_0"])
def test_cache_types_against_llama(paths, models, type_kv):
    """Caches of every type, flash attention on, 70 tokens and three more steps: logits only, the cache shows in them."""
    batches = tokens_of(Scenario(({0: 70}, {0: 1}, {0: 1}, {0: 1})), models["bard"].hparams.n_vocab)
    options = LlamaOptions(flash_attn=True, type_k=type_kv, type_v=type_kv)
    theirs = run_llama(LlamaJob(model=paths["bard"], steps=llama_steps(batches), options=options))
    with models["bard"].session(n_ctx=options.n_ctx, graph="plain", flash_attn=True, type_k=type_kv, type_v=type_kv) as session:
        for batch, want in zip(batches, theirs.logits, strict=True):
            assert nmse(session.decode(batch[0], logits="all"), want) <= CACHE_LIMIT


@pytest.mark.parametrize("graph", ["plain", "auto"])
def test_greedy_text_is_llamas(paths, models, graph):
    """200 tokens of the embedded model, under the near-tie rule."""
    prompt = models["embedded"].tokenizer.encode("To be, or not to be")
    theirs = run_llama(LlamaJob(model=paths["embedded"], greedy_prompt=tuple(prompt), n_greedy=200,
                                options=LlamaOptions(flash_attn=True, type_k="f16", type_v="f16")))
    greedy, gaps = [], []
    with models["embedded"].session(n_ctx=512, graph=graph, flash_attn=True) as session:
        rows = session.decode(prompt)
        for _ in range(200):
            greedy.append(int(rows[-1].argmax()))
            gaps.append(top2_gap(rows[-1]))
            rows = session.decode(greedy[-1:])
    assert len(set(greedy)) > 15
    np.testing.assert_allclose(gaps[0], theirs.greedy_gaps[0], atol=1e-2)
    assert_same_greedy(greedy, theirs.greedy, theirs.greedy_gaps)


def test_another_graph_or_token_is_noticed(paths, models):
    """The comparison above fails for the lean graph, by its names, and for one changed token, by its values."""
    options = LlamaOptions(flash_attn=True)
    theirs = run_llama(LlamaJob(model=paths["toy"], steps=llama_steps([{0: [3, 1, 4, 1, 5]}]), capture=("*",), options=options))
    for graph, last, noticed in (("lean", 5, "ffn_moe_probs-0 #0: only in llama.cpp"), ("plain", 9, "result_output #0: NMSE")):
        with models["toy"].session(n_ctx=512, graph=graph, flash_attn=True, type_k="f32", type_v="f32") as session:
            _, [ours] = record_ours(session, [{0: [3, 1, 4, 1, last]}])
        assert any(line.startswith(noticed) for line in compare_nodes(ours, theirs.nodes, NODE_LIMIT))


def _node(name, array, *, op="MUL", occurrence=0):
    array = np.asarray(array, np.float32).reshape(1, 1, *np.shape(array))
    return Node(name, occurrence, 0, 0, op, array.shape[::-1], array)


def test_the_comparison_sees_every_kind_of_difference():
    rng = np.random.default_rng(5)
    x, mask = rng.normal(size=(3, 4)), np.array([[0, -np.inf], [0, 0]])
    theirs = [_node("a-0", x), _node("a-0", 2 * x, occurrence=1), _node("mask", mask, op="NONE"),
              _node("ffn_moe_topk-0", [[3, 1]]), _node("node_7", x), _node("a-0 (view)", x)]
    same = {(n.name, n.occurrence): (n.op, n.ne, n.array.copy()) for n in theirs[:4]}
    assert compare_nodes(same, theirs, 1e-6) == []
    assert compare_nodes(same | {("ffn_moe_topk-0", 0): ("MUL", (2, 1, 1, 1), np.array([[1, 3]]))}, theirs, 1e-6) == []
    for key, change in {
        ("a-0", 0): ("MUL", (4, 3, 1, 1), theirs[0].array * 1.01),
        ("a-0", 1): ("MUL", (4, 3, 1, 1), theirs[0].array),
        ("mask", 0): ("NONE", (2, 2, 1, 1), mask.T),
        ("ffn_moe_topk-0", 0): ("MUL", (2, 1, 1, 1), np.array([[3, 2]])),
        ("b-0", 0): ("MUL", (4, 3, 1, 1), x),
    }.items():
        [line] = compare_nodes(same | {key: change}, theirs, 1e-6)
        assert key[0] in line
    for bad in (("ADD", (4, 3, 1, 1), x), ("MUL", (3, 4, 1, 1), x.T), ("MUL", (4, 3, 1, 1), np.full((3, 4), np.nan))):
        assert len(compare_nodes(same | {("a-0", 0): bad}, theirs, 1e-6)) == 1
    del same["a-0", 1]
    assert compare_nodes(same, theirs, 1e-6) == ["a-0 #1: only in llama.cpp, MUL (4, 3, 1, 1)"]
