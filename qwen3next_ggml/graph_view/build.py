"""Emit a graph and read it off, with or without memory behind its tensors (level 7)."""

from __future__ import annotations

from collections.abc import Sequence

from .. import ggml
from ..errors import OptionError
from ..graph.builder import GraphBuilder
from ..graph.inputs import Inputs, Sizes
from ..graph.key import GraphKey, node_budget
from ..graph.options import GraphOptions
from ..graph.patch import patched
from ..graph.state import GraphState, KvSpec, RecurrentSpec
from ..memory.kv_cache import KvCache, padded
from ..memory.recurrent import RecurrentMemory
from .costs import VIEW_OPS, Shaped, barriers, flops, traffic
from .lines import LineRecorder
from .records import EMPTY, INPUT, KERNEL, STATE, VIEW, WEIGHT, GraphView, Node
from .scopes import places


def outline(
    model, options: GraphOptions, *, n_tokens: int = 1, n_past: int = 0, type_k: str = "f16", type_v: str = "f16",
    mtp: bool = False, lines: bool = False,
) -> GraphView:  # fmt: skip
    """List the graph that takes `n_tokens` more tokens of one sequence, without giving anything memory.

    `model` needs no weights, only their tensors. Raises OptionError for counts or cache types that mean nothing.
    """
    if n_tokens < 1 or n_past < 0:
        raise OptionError(f"a graph for {n_tokens} tokens after {n_past}: at least 1 after at least 0 are needed")
    if mtp and not model.hparams.n_layer_nextn:
        raise OptionError("this model has no NextN block")
    n_kv = padded(n_past + n_tokens)
    options = options.for_session(type_v, 1, model.devices)
    specs = model.arch.state_specs(model.hparams, mtp=True) if mtp else model.arch.state_specs(model.hparams)
    with ggml.Context(3 * len(specs)) as ctx:
        state = _unplaced(ctx, specs, n_kv, type_k, type_v, options)
        return list_graph(model, state, GraphKey(Sizes(n_tokens, 1, 1, n_kv, 0), options, mtp=mtp), lines=lines)


def _unplaced(ctx: ggml.Context, specs: Sequence, n_cells: int, type_k: str, type_v: str, options: GraphOptions) -> GraphState:
    """Make the tensors of a state for one sequence, without memory."""
    kv = KvCache([s for s in specs if isinstance(s, KvSpec)], n_cells, 1, type_k=type_k, type_v=type_v, **options.kv_layout)
    recurrent = RecurrentMemory([s for s in specs if isinstance(s, RecurrentSpec)], 1)
    for spec in specs:
        (kv if isinstance(spec, KvSpec) else recurrent).declare(ctx, spec)
    return GraphState(kv.layers, recurrent.states)


def list_graph(model, state: GraphState, key: GraphKey, *, lines: bool = False) -> GraphView:
    """Emit the graph of `key` over `state` and return it as data; with `lines` each node knows what made it."""
    arch, hp, weights, sizes = model.arch, model.hparams, model.weights, key.sizes
    budget = node_budget(key, 1 if key.mtp else hp.n_layer, hp.n_expert_used)
    with ggml.Context(budget, graph_size=budget) as ctx:
        graph = ggml.Graph(ctx, budget)
        make = LineRecorder if lines else GraphBuilder
        g = make(ctx, graph, key.options, on_name=patched(key.patches), **weights.for_graphs)
        emit = arch.build_arch_graph_mtp if key.mtp else arch.build_arch_graph
        emit(g, hp, weights, Inputs(g, sizes, **arch.inputs(hp)), state)
        layer_of = g.node_layers()
        devices = [model.layer_devices[layer_of[x]].name for x in graph.nodes]
        made_by = _made_by(graph.nodes, g.lines) if lines else {}
        nodes, leaves = _read(graph.nodes, devices, made_by, hp.recurrent_layers, key.mtp, weights.by_name)
    what = "the NextN block" if key.mtp else arch.ARCH
    n = f"{sizes.n_tokens} tokens" if sizes.n_tokens > 1 else "1 token"
    return GraphView(f"{what}, {n}, {sizes.n_kv} cells, delta net {key.options.delta_net}", nodes, leaves)


def _made_by(nodes: Sequence[ggml.Tensor], lines: dict) -> dict[ggml.Tensor, tuple[str, ...]]:
    """Return the lines of every node; one that ggml made on the way to another takes that one's."""
    found = dict(lines)
    for x in reversed(nodes):
        for source in x.src:
            if source not in found and x in found:
                found[source] = found[x]
    return found


def _read(nodes, devices, made_by, recurrent, mtp: bool, weights) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    index = {x: i for i, x in enumerate(nodes)}
    shaped: dict[ggml.Tensor, Shaped] = {}

    def shape_of(x: ggml.Tensor) -> Shaped:
        if x not in shaped:
            shaped[x] = Shaped(x.op, x.type, x.ne, x.view_src is not None)
        return shaped[x]

    # a cast names itself as where it writes
    sources = [[source for source in x.src if source != x] for x in nodes]
    names = [x.name.strip() for x in nodes]
    leaf_names = {s: s.name for mine in sources for s in mine if s not in index}
    refs = [[index.get(s, leaf_names.get(s)) for s in mine] for mine in sources]
    where = places(names, refs, recurrent, mtp)
    waits = barriers([shape_of(x) for x in nodes], [[index.get(s) for s in mine] for mine in sources])
    listed, leaves = [], {}
    for i, x in enumerate(nodes):
        me, mine = shape_of(x), [shape_of(s) for s in sources[i]]
        layer, scope = where[i]
        read, written = traffic(me, mine)
        kind = VIEW if me.op in VIEW_OPS else KERNEL if me.n else EMPTY
        listed.append(Node(
            str(i), names[i], me.op, kind, me.type.name, x.shape, devices[i], layer, scope, tuple(map(str, refs[i])), read, written,
            flops(me, mine), waits[i], made_by.get(x, ()),
        ))  # fmt: skip
        for s in sources[i]:
            if s in leaf_names and leaf_names[s] not in leaves:
                name = leaf_names[s]
                kind = INPUT if s.is_input else WEIGHT if name in weights else STATE
                leaves[name] = Node(name, name, "NONE", kind, s.type.name, s.shape, devices[i], layer, scope)
    return tuple(listed), tuple(leaves.values())
