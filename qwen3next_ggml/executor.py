"""Run built graphs: on one device through an allocator, on several through a scheduler (level 5).

Knows tensors and devices; knows no model, memory or text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import ggml


@dataclass(eq=False)
class Built:
    """One graph that can be run again and again.

    `inputs` are the inputs the graph reads; `logits` [n_vocab, n_outputs] is None where no row is wanted, `hidden`
    [n_embd, …] where nobody asked for it; `top` are ids and logits of the largest where those are handed out instead;
    `kept` holds captured nodes by (name, occurrence), `direct` the shapes of those that come out with the outputs, `fetched` these
    values of the last run; `device_of` says which device a node belongs to where there are several.
    """

    ctx: ggml.Context
    graph: ggml.Graph
    inputs: Mapping[str, ggml.Tensor]
    logits: ggml.Tensor | None
    hidden: ggml.Tensor | None = None
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    kept: Mapping[tuple[str, int], tuple[ggml.Tensor, ggml.Tensor]] = field(default_factory=dict)
    device_of: Mapping[ggml.Tensor, ggml.Device] = field(default_factory=dict)
    top: tuple[ggml.Tensor, ...] = ()
    step: ggml.Step | None = None
    direct: Mapping[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    fetched: Mapping[tuple[str, int], np.ndarray] = field(default_factory=dict)

    @property
    def outputs(self) -> list[ggml.Tensor]:
        return list(self.top) or [x for x in (self.logits, self.hidden) if x is not None]

    def arrange(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return the values of the inputs the graph reads, in their order."""
        return tuple([values[name] for name in self.inputs])

    def row(self, i: int) -> np.ndarray:
        """Read the logits [n_vocab] of an output row, as long as no other graph has run."""
        nbytes = 4 * self.logits.ne[0]
        return self.logits.raw(i * nbytes, nbytes).view(np.float32)

    def read_kept(self) -> dict[tuple[str, int], np.ndarray]:
        """Copy out what the last run left in the captured nodes, full ggml shapes reversed."""
        rest = {at: pair for at, pair in self.kept.items() if at not in self.fetched}
        return {**self.fetched, **{at: value.get().reshape(node.ne[::-1]) for at, (node, value) in rest.items()}}

    def close(self) -> None:
        """Free the graph's tensor structs."""
        self.ctx.close()


class OneDevice:
    """Run graphs on one backend; one compute buffer serves all of them."""

    keeps_outputs = True  # the outputs of a run can be read until the next one

    def __init__(self, backend: ggml.Backend):
        self.backend = backend
        self._allocator = ggml.GraphAllocator([backend.device.buffer_type()])

    def reserve(self, built: Built) -> None:
        """Size the compute buffer for `built`."""
        self._allocator.reserve(built.graph)

    def place(self, built: Built) -> bool:
        """Give `built` its memory; True means the buffer moved and every graph placed before is void."""
        grew = self._allocator.alloc(built.graph)
        built.inputs = {name: x for name, x in built.inputs.items() if x.data}
        plain = {at: node for at, (node, x) in built.kept.items() if x.type.name == "f32" and x.is_contiguous}
        built.direct = {at: node.ne[::-1] for at, node in plain.items()}
        built.step = self._step(built)
        return grew

    def run(self, built: Built, arrays: tuple[np.ndarray, ...], outs: Sequence[np.ndarray]) -> None:
        """Fill the inputs from `arrays`, in their order, compute, and fetch the outputs into `outs`, arrays with the axes reversed."""
        if not built.direct:
            built.step.run(arrays, outs)
            return
        fetched = {at: np.empty(shape, np.float32) for at, shape in built.direct.items()}
        built.step.run(arrays, [*outs, *fetched.values()])
        built.fetched = fetched

    def _step(self, built: Built) -> ggml.Step:
        values = [built.kept[at][1] for at in built.direct]
        return ggml.Step(self.backend, built.graph, list(built.inputs.values()), built.outputs + values)

    @property
    def nbytes(self) -> int:
        return self._allocator.size

    def close(self) -> None:
        """Free the compute buffer and the backend."""
        self._allocator.close()
        self.backend.close()


class OneDeviceRenewed(OneDevice):
    """Run graphs on a device that keeps bindings: the backend starts over whenever another graph comes."""

    _ran: tuple[Built | None, int] = None, 0

    def run(self, built: Built, arrays: tuple[np.ndarray, ...], outs: Sequence[np.ndarray]) -> None:
        """Do as OneDevice does."""
        if self._ran != (built, self.backend.n_starts):
            self.backend.renew()
            built.step, self._ran = self._step(built), (built, self.backend.n_starts)
        super().run(built, arrays, outs)


class ManyDevices:
    """Run graphs over several backends, the CPU's last; every node is pinned to its device before each split.

    Those that keep bindings start over whenever another graph comes.
    """

    keeps_outputs = False

    def __init__(self, backends: Sequence[ggml.Backend], graph_size: int):
        self.backends = list(backends)
        self._backend_of = {backend.device: backend for backend in reversed(backends)}
        self._renewed = [backend for backend in backends if backend.device.keeps_bindings]
        self._ran: Built | None = None
        self._graph_size = graph_size
        self._scheduler = ggml.Scheduler(self.backends, graph_size)

    def reserve(self, built: Built) -> None:
        """Size the compute buffers for `built`."""
        self._pin(built)
        self._scheduler.reserve(built.graph)

    def place(self, built: Built) -> bool:
        """Nothing is kept placed between runs: the scheduler splits and places a graph each time."""
        return False

    def run(self, built: Built, arrays: tuple[np.ndarray, ...], outs: Sequence[np.ndarray]) -> None:
        """Split, place, fill the inputs from `arrays`, compute, and fetch the outputs into `outs`, axes reversed."""
        if self._renewed and built is not self._ran:
            self._renew()
            self._ran = built
        self._scheduler.reset()
        self._pin(built)
        self._scheduler.alloc(built.graph)
        for x, array in zip(built.inputs.values(), arrays, strict=True):
            if x.data:
                x.set(array)
        self._scheduler.compute(built.graph)
        for x, out in zip(built.outputs, outs, strict=True):
            out[:] = x.get().reshape(out.shape)

    def _renew(self) -> None:
        self._scheduler.close()
        for backend in self._renewed:
            backend.renew()
        self._scheduler = ggml.Scheduler(self.backends, self._graph_size)

    def _pin(self, built: Built) -> None:
        for node, device in built.device_of.items():
            self._scheduler.pin(node, self._backend_of[device])

    @property
    def nbytes(self) -> int:
        return 0

    def close(self) -> None:
        """Free the scheduler and the backends."""
        self._scheduler.close()
        for backend in self.backends:
            backend.close()


def executor(devices: Sequence[ggml.Device], n_threads: int, graph_size: int) -> OneDevice | ManyDevices:
    """Return what runs graphs of up to `graph_size` nodes over these devices, with as many threads where a device has threads."""
    if len(devices) > 1:
        # a scheduler wants the CPU, as the last
        cpu = [device for device in devices if device.kind == "cpu"] or [ggml.device("CPU")]
        devices = [device for device in devices if device.kind != "cpu"] + cpu
    backends = [device.init() for device in devices]
    for backend in backends:
        backend.set_n_threads(n_threads)
    if len(backends) > 1:
        return ManyDevices(backends, graph_size)
    [backend] = backends
    return (OneDeviceRenewed if backend.device.keeps_bindings else OneDevice)(backend)
