"""Build graphs by key and keep the recent ones (level 6)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from . import ggml
from .executor import Built, ManyDevices, executor
from .graph.builder import GraphBuilder, capture
from .graph.inputs import Inputs, Sizes
from .graph.key import GraphKey, node_budget
from .graph.options import GraphOptions
from .graph.patch import patched
from .graph.state import GraphState
from .graph.top import top_logits

MAX_GRAPHS = 16


class GraphCache:
    """Own the compute buffer and the built graphs of one session.

    `n_builds` counts the graphs built for decoding, `n_changes` those added and dropped. The buffer is sized at the start for
    `worst`; should it still have to grow, every graph placed in it is built again. Most nodes has a graph of one token of each of
    `n_seq_max` sequences. `before_use` is called before graphs come or go, for what the last run left in the buffer may go with
    them; before a run that is the caller's care. `builder` makes what graphs are emitted with.
    """

    builder: Callable[..., GraphBuilder] = GraphBuilder

    def __init__(
        self, model, state: GraphState, options: GraphOptions, worst: Sizes, *, n_seq_max: int, n_threads: int,
        state_devices: Sequence[ggml.Device] | None = None,
    ):  # fmt: skip
        self.model = model
        self.state = state
        self.state_devices = state_devices or model.layer_devices
        self.n_builds = 0
        self.n_changes = 0
        self.before_use: Callable[[], None] = _nothing
        self._graphs: OrderedDict[GraphKey, Built] = OrderedDict()
        key, most_nodes = GraphKey(worst, options), GraphKey(replace(worst, n_seq_tokens=1, n_seqs=n_seq_max), options)
        elsewhere = (device for device in dict.fromkeys(self.state_devices) if device not in model.devices)
        self.executor = executor([*model.devices, *elsewhere], n_threads, 2 * max(self._budget(key), self._budget(most_nodes)))
        built = self.build(key)
        self.executor.reserve(built)
        built.close()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: GraphKey) -> Built:
        """Return the graph of `key`, ready to run."""
        built = self._graphs.get(key)
        if built is not None:
            self._graphs.move_to_end(key)
            return built
        self.before_use()
        built = self.build(key)
        self.n_builds += 1
        self.n_changes += 1
        if self.executor.place(built):
            self._drop_all()
        self._graphs[key] = built
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].close()
        return built

    def build(self, key: GraphKey) -> Built:
        """Emit the graph of `key` without giving it memory."""
        hp, arch, weights = self.model.hparams, self.model.arch, self.model.weights
        budget = self._budget(key)
        ctx = ggml.Context(budget, graph_size=budget)
        graph = ggml.Graph(ctx, budget // 3 if key.captures else budget)
        g = self.builder(ctx, graph, key.options, on_name=patched(key.patches), **weights.for_graphs)
        emit = arch.build_arch_graph_mtp if key.mtp else arch.build_arch_graph
        logits = emit(g, hp, weights, Inputs(g, key.sizes, **arch.inputs(hp)), self.state)
        hidden = g.outputs.get("h_nextn")
        device_of = self._places(g) if isinstance(self.executor, ManyDevices) else {}
        kept = {}
        if key.captures:
            graph, kept = capture(g, graph, lambda name: any(fnmatchcase(name, p) for p in key.captures))
        top = top_logits(g, logits, key.top) if key.top else ()
        for x in (logits, hidden, *top):
            if x is not None:
                g.set_output(x)
        return Built(ctx, graph, g.inputs, logits, hidden, g.constants, kept, device_of, top)

    def _places(self, g: GraphBuilder) -> dict[ggml.Tensor, ggml.Device]:
        """Return the device of every node: of a view where that lies, else where the state is that it touches, else its layer's."""
        held = {x: self.state_devices[il] for il, layer in self.state.kv.items() for x in (layer.k, layer.v)}
        held |= {state.all: self.state_devices[il] for (il, _), state in self.state.recurrent.items()}
        places: dict[ggml.Tensor, ggml.Device] = {}
        for node, il in g.node_layers().items():
            touched = (held.get(x.view_src or x) for x in (node, *node.src))
            places[node] = places.get(node.view_src) or next(filter(None, touched), self.model.layer_devices[il])
        return places

    def drop(self, doomed: Callable[[GraphKey], bool]) -> None:
        """Free the graphs whose key is `doomed`."""
        self.before_use()
        for key in [key for key in self._graphs if doomed(key)]:
            self.n_changes += 1
            self._graphs.pop(key).close()

    def _budget(self, key: GraphKey) -> int:
        n_layer = 1 if key.mtp else self.model.hparams.n_layer
        return node_budget(key, n_layer, self.model.hparams.n_expert_used)

    def _drop_all(self) -> None:
        self.before_use()
        self.n_changes += 1
        for built in self._graphs.values():
            built.close()
        self._graphs.clear()

    def close(self) -> None:
        """Free the graphs, the compute buffer and the backends."""
        self._drop_all()
        self.executor.close()


def _nothing() -> None:
    pass
