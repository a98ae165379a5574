"""Put nodes of one's own in the place of named values while a graph is emitted (level 5)."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .. import ggml
from ..errors import GraphError
from .builder import GraphBuilder


@dataclass(frozen=True)
class Patch:
    """Put `fn(g, x)`, nodes built from the value named `name`, in its place. Two patches are one only if `fn` is."""

    name: str
    fn: Callable[[GraphBuilder, ggml.Tensor], ggml.Tensor]


def matches(pattern: str, name: str, occurrence: int) -> bool:
    """Say whether a glob pattern over llama.cpp's names, with or without "#occurrence", names this value."""
    glob, _, number = pattern.partition("#")
    return fnmatchcase(name, glob) and (not number or int(number) == occurrence)


def patched(patches: tuple[Patch, ...]) -> Callable[[GraphBuilder, ggml.Tensor, str], ggml.Tensor] | None:
    """Return what a builder calls for every value it names; None where there is nothing to put in."""
    if not patches:
        return None
    last: dict[str, ggml.Tensor] = {}
    seen: dict[str, int] = {}

    def on_name(g: GraphBuilder, x: ggml.Tensor, name: str) -> ggml.Tensor:
        if last.get(name) == x:
            return x  # named twice on its way through the blocks
        occurrence = seen[name] = seen.get(name, -1) + 1
        for patch in patches:
            if matches(patch.name, name, occurrence):
                x = _replace(g, x, name, patch.fn)
        last[name] = x
        return x

    return on_name


def _replace(g: GraphBuilder, x: ggml.Tensor, name: str, fn: Callable) -> ggml.Tensor:
    y = fn(g, x)
    if not isinstance(y, ggml.Tensor) or y.ne != x.ne:
        got = list(y.ne) if isinstance(y, ggml.Tensor) else repr(y)
        raise GraphError(f"patch of {name}: expected a value of shape {list(x.ne)}, got {got}")
    if y != x:
        g.set_name(x, f"{name} (before patch)")
        g.set_name(y, name)
    return y
