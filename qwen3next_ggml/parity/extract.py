"""Stop a run at one of its nodes and take out the op that computes it, with what it reads (level 11).

The graph is computed node by node, so that everything the op reads is still there. Knows nothing of the other side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from .. import ggml
from ..errors import OptionError
from ..executor import Built, OneDevice
from ..graph.builder import PLAIN_VIEW_OPS, GraphBuilder
from .one_op import Laid, OneOp, stored
from .sides import Run, opened

# calls that change nothing in a node's value
MARKS = frozenset({"set_name", "set_input", "set_output"})


def extract(run: Run, name: str, occurrence: int, ubatch: int) -> OneOp:
    """Return the op behind node `name`, `occurrence`, of the graph that `run` computes in `ubatch`; its value is not among the arrays.

    Raises OptionError where no op made it, and for a run on several devices; else what sessions raise.
    """
    devices = run.device.split(",")
    if len(devices) > 1:
        raise OptionError(f"an op is taken out of a run on one device, this one is on {len(devices)}: {run.device}")
    with opened(run) as session:
        calls: dict = {}
        session.graphs.builder = partial(CallRecorder, calls=calls)
        session.graphs.executor = stop = _Stop(session.graphs.executor, calls, name, occurrence, ubatch)
        try:
            for batch in run.batches:
                session.decode_batch({0: batch}, logits="all")
        except _Reached:
            return stop.found
        finally:
            session.graphs.executor = stop.inner
            stop.close()
    raise OptionError(f"{name} #{occurrence} is not computed in ubatch {ubatch} of this run")


class CallRecorder(GraphBuilder):
    """Build a graph and keep, for every node, the calls that made it and set something in it: (method, arguments by name)."""

    def __init__(self, *args, calls: dict, **options):
        super().__init__(*args, **options)
        self.calls = calls


def _noting(method: str) -> Callable:
    signature = inspect.signature(getattr(ggml.Ops, method))

    def call(self, *args, **options):
        made = getattr(super(CallRecorder, self), method)(*args, **options)
        bound = signature.bind(self, *args, **options)
        bound.apply_defaults()
        arguments = dict(list(bound.arguments.items())[1:])
        # an op made inside another method is that one's own
        if made not in self.calls or made in arguments.values():
            self.calls.setdefault(made, []).append((method, arguments))
        return made

    return call


for _name, _ in inspect.getmembers(ggml.Ops, callable):
    if not _name.startswith("_") and _name not in MARKS:
        setattr(CallRecorder, _name, _noting(_name))


class _Reached(Exception):
    """The op that was looked for is in `_Stop.found`."""


class _Stop:
    """An executor in the place of `inner` that computes one ubatch node by node, up to the op it looks for."""

    def __init__(self, inner: OneDevice, calls: Mapping, name: str, occurrence: int, ubatch: int):
        self.inner, self._calls, self._wanted, self._left = inner, calls, (name, occurrence), ubatch
        self._one = ggml.Excerpt(inner.backend)
        self.found: OneOp | None = None

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def run(self, built: Built, arrays: tuple[np.ndarray, ...], outs: Sequence[np.ndarray]) -> None:
        """Run `built` as its executor does, or stop in it."""
        if self._left:
            self._left -= 1
            return self.inner.run(built, arrays, outs)
        named = [node for node in built.graph.nodes if node.name == self._wanted[0]]
        if len(named) <= self._wanted[1]:
            raise OptionError(f"{self._wanted[0]} is an input of the graph, no op made it")
        node = named[self._wanted[1]]
        kernel = _kernel(node, self._calls)
        for x, array in zip(built.inputs.values(), arrays, strict=True):
            x.set(array)
        for other in built.graph.nodes:
            if other == kernel:
                break
            if other.op not in PLAIN_VIEW_OPS and other.nelements:
                self._one.run(other)
        self.found = _taken(node, kernel, self._calls[kernel])
        raise _Reached

    def close(self) -> None:
        self._one.close()


def _kernel(node: ggml.Tensor, calls: Mapping) -> ggml.Tensor:
    """Return what computes a node: of a view what it looks at, but a view that came with its kernel in one call stays."""
    while node.op in PLAIN_VIEW_OPS and node.src and node.src[0] in calls:
        node = node.src[0]
    if node not in calls or node.op in PLAIN_VIEW_OPS and node.src[0].op in PLAIN_VIEW_OPS:
        raise OptionError(f"{node.name} is what {node.view_src.name} held before this ubatch, no op of it made that")
    return node


def _taken(node: ggml.Tensor, kernel: ggml.Tensor, calls: Sequence) -> OneOp:
    names: dict[ggml.Tensor, str] = {kernel: "y"}
    operands, arrays, given = {}, {}, {}
    calls = _without_idle_places(kernel, calls)
    for _, arguments in calls:
        for argument, x in arguments.items():
            if isinstance(x, ggml.Tensor) and x != kernel:
                # the script calls the graph g
                given.setdefault(x, "gate" if argument == "g" else argument)
    # what another operand is a view of comes before it
    for x in sorted(given, key=lambda x: x.view_src in given):
        name = names[x] = given[x]
        operands[name] = Laid(x.type.name, x.ne, x.nb)
        if x.view_src in names:
            operands[name] = replace(operands[name], offset=x.view_offs, of=names[x.view_src])
        else:
            arrays[name] = stored(x.raw() if x.data else np.zeros(x.nbytes, np.uint8), x.type.name)
    spelt = ((method, tuple(_argument(x, names) for x in arguments.values())) for method, arguments in calls)
    op = kernel.op if kernel.op not in PLAIN_VIEW_OPS else kernel.src[0].op
    result = Laid(node.type.name, node.ne, node.nb, node.data - kernel.data)
    whole = result.contiguous and node.nelements == kernel.nelements and node.type == kernel.type
    return OneOp(node.name, op, tuple(spelt), operands, result, whole, arrays)


def _without_idle_places(kernel: ggml.Tensor, calls: Sequence) -> list:
    """Return the calls that decide what is computed: where a result lies does so only if the op reads from there."""
    read = {x for method, arguments in calls if method != "into" for x in arguments.values() if isinstance(x, ggml.Tensor) and x != kernel}
    read |= {x.view_src for x in read}
    return [(method, arguments) for method, arguments in calls if method != "into" or arguments["owner"] in read]


def _argument(x: object, names: Mapping[ggml.Tensor, str]) -> object:
    if isinstance(x, ggml.Tensor):
        return names[x]
    if isinstance(x, ggml.GgmlType):
        return f"g.type({x.name!r})"
    return x.item() if isinstance(x, np.generic) else x
