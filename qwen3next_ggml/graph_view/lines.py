"""A builder that notes which Python lines make each node (level 7)."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import FrameType

from .. import ggml
from ..graph.builder import GraphBuilder

PACKAGE = os.path.dirname(os.path.dirname(__file__))
# frames inside an op's own wrapper say nothing; the walk ends where a listing asks for the graph
INNER = (os.path.join(PACKAGE, "ggml") + os.sep, "<ggml op", __file__)
END = os.path.join(os.path.dirname(__file__), "build.py")


class LineRecorder(GraphBuilder):
    """Build a graph and keep, for every node, the lines that made it: innermost outside ggml/ first.

    Files of this package go by their path inside it, others by their name.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.lines: dict[ggml.Tensor, tuple[str, ...]] = {}


def _noting(name: str, op: Callable) -> Callable:
    @functools.wraps(op)
    def call(self, *args, **options):
        made = getattr(super(LineRecorder, self), name)(*args, **options)
        if made not in self.lines:
            self.lines[made] = _stack(sys._getframe(1))
        return made

    return call


for _name, _op in inspect.getmembers(ggml.Ops, callable):
    if not _name.startswith("_"):
        setattr(LineRecorder, _name, _noting(_name, _op))


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    lines = []
    while frame and frame.f_code.co_filename != END:
        if not frame.f_code.co_filename.startswith(INNER):
            lines.append(f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)


@functools.cache
def _shown(path: str) -> str:
    if path.startswith(PACKAGE + os.sep):
        return os.path.relpath(path, PACKAGE).replace(os.sep, "/")
    return os.path.basename(path)
