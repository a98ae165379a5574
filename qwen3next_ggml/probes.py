"""Which nodes to read or replace, and what that does to a graph (level 7).

A capture makes nodes outputs of the graph; a patch puts nodes of its own behind one. Knows names and graphs; knows no
sequences and no text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches

import numpy as np

from .errors import GraphError
from .graph.key import GraphKey
from .graph.options import FAST_OPTIONS, PLAIN
from .graph.patch import Patch, matches
from .graph_cache import GraphCache

Shapes = Mapping[tuple[str, int], tuple[int, ...]]
# (tokens, wanted rows) of the graphs that are looked at: options may act on one token, on a few, or on a long prompt only;
# and a dimension that follows the few or the more is the token axis
ONE, FEW, MORE, LONG = (1, 1), (3, 2), (5, 4), (300, 299)


class Capture(Mapping):
    """Values by node name, filled while its block runs: float32 arrays, axes reversed from ggml order.

    Of a name that llama.cpp gives several times in a layer, `t["Kcur-3"]` is the last and `t["Kcur-3#0"]` the first.
    Values with a token axis grow along it from run to run; states and the like keep the last.
    """

    def __init__(self, patterns: tuple[str, ...], axes: Mapping[tuple[str, int], int | None]):
        self.patterns = patterns
        self.axes = axes
        self._parts: dict[tuple[str, int], list[np.ndarray]] = {}
        self._wanted: dict[tuple[str, int], bool] = {}

    def add(self, values: Mapping[tuple[str, int], np.ndarray]) -> None:
        """Note the values of one graph run, full ggml shapes reversed."""
        for at, value in values.items():
            if at not in self._wanted:
                self._wanted[at] = any(matches(p, *at) for p in self.patterns)
            if self._wanted[at]:
                if self.axes.get(at) is None:
                    self._parts[at] = [value]
                else:
                    self._parts.setdefault(at, []).append(value)

    def take(self) -> dict[tuple[str, int], list[np.ndarray]]:
        """Return what was noted since the last time, (name, occurrence) → values of one graph run each, and forget it."""
        taken, self._parts = self._parts, {}
        return taken

    def __getitem__(self, name: str) -> np.ndarray:
        base, _, number = name.partition("#")
        found = sorted(n for b, n in self._parts if b == base)
        at = (base, int(number) if number else found[-1] if found else 0)
        if at not in self._parts:
            raise KeyError(f"{name} was not captured; there are {', '.join(self) or 'no values yet'}")
        parts, axis = self._parts[at], self.axes.get(at)
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
        return value.reshape(trimmed(value.shape))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self._parts))

    def __len__(self) -> int:
        return len({name for name, _ in self._parts})


class Probes:
    """The captures and patches in force in one session; `graphs` builds, `base` is the key of an everyday graph.

    `n_changes` counts their coming and going.
    """

    def __init__(self, graphs: GraphCache, base: GraphKey):
        self.graphs = graphs
        self.base = base
        self.captures: list[Capture] = []
        self.n_changes = 0
        self._patches: list[Patch] = []
        self._off: list[str] = []
        self._served: dict[GraphKey, GraphKey] = {}
        self._known: dict[GraphKey, Shapes] = {}

    @property
    def quiet(self) -> bool:
        return not self.captures and not self._patches

    def key(self, key: GraphKey) -> GraphKey:
        """Return the key of the graph that serves them all."""
        if self.quiet:
            return key
        if key not in self._served:
            captures = {_glob(p) for c in self.captures for p in c.patterns} | set(key.captures)
            self._served[key] = replace(_without(key, self._off), patches=tuple(self._patches), captures=tuple(sorted(captures)))
        return self._served[key]

    def note(self, values: Mapping[tuple[str, int], np.ndarray]) -> None:
        """Hand the values of one graph run to the captures."""
        for capture in self.captures:
            capture.add(values)

    @contextmanager
    def capture(self, patterns: tuple[str, ...]) -> Iterator[Capture]:
        """Read the nodes that `patterns` name in every graph run inside the block."""
        axes, off = look(self._shapes, self.key(self.base), patterns)
        found = Capture(patterns, axes)
        with self._in_force(self.captures, found, off):
            yield found

    @contextmanager
    def patch(self, name: str, fn: Callable) -> Iterator[None]:
        """Put `fn(g, x)` in the place of `name` in every graph run inside the block; its graphs go with the block."""
        _, off = look(self._shapes, self.key(self.base), (name,))
        with self._in_force(self._patches, Patch(name, fn), off):
            yield

    @contextmanager
    def _in_force(self, kind: list, new: object, off: tuple[str, ...]) -> Iterator[None]:
        kind.append(new)
        self._off += off
        self._changed()
        try:
            yield
        finally:
            # two captures of the same values are equal, and still two
            kind[:] = [x for x in kind if x is not new]
            for name in off:
                self._off.remove(name)
            self._changed()
            self.graphs.drop(lambda key: bool(key.captures or key.patches))

    def _changed(self) -> None:
        self.n_changes += 1
        self._served.clear()

    def _shapes(self, key: GraphKey) -> Shapes:
        """Return the shape of everything that has a name in the graph of `key`."""
        key = replace(key, captures=("*",))
        if key in self._known:
            return self._known[key]
        built = self.graphs.build(key)
        found = {at: node.ne for at, (node, _) in built.kept.items()}
        built.close()
        if not key.patches:
            self._known[key] = found
        return found


def look(shapes: Callable[[GraphKey], Shapes], key: GraphKey, patterns: Iterable[str]) -> tuple[dict, tuple[str, ...]]:
    """Find the nodes that `patterns` name → the token axis of each, and the fast options that must be off for them.

    An option must be off when it removes or reshapes a node that the plain graph has, alone or beside those that stay on.
    Raises GraphError for a pattern that names nothing, with the closest names.
    """
    patterns = tuple(patterns)
    forms = (ONE,) if key.options.delta_net == "autoregressive" else (ONE, FEW, LONG)

    def of(key: GraphKey, form: tuple[int, int]) -> Shapes:
        return shapes(replace(key, sizes=replace(key.sizes, n_seq_tokens=form[0], n_outputs=form[1], keep=())))

    def named(key: GraphKey, form: tuple[int, int]) -> set:
        return {(at, ne) for at, ne in of(key, form).items() if any(matches(p, *at) for p in patterns)}

    fast, off = key, []
    on = [name for name in FAST_OPTIONS if getattr(key.options, name) != getattr(PLAIN, name)]
    wanted = {form: named(_without(key, on), form) for form in forms}
    hidden = [form for form in forms if not wanted[form] <= named(key, form)]
    if hidden:
        off = _hiding(on, lambda names: all(wanted[form] <= named(_without(key, names), form) for form in hidden))
        fast = _without(key, off)
    found = dict.fromkeys(at for form in forms for at, _ in named(fast, form))
    for pattern in patterns:
        if not any(matches(pattern, *at) for at in found):
            raise GraphError(f"no node is named {pattern}; {_closest(pattern, [at for form in forms for at in of(fast, form)])}")
    few, more = of(fast, FEW), of(fast, MORE)
    return {at: _token_axis(few.get(at), more.get(at)) for at in found}, tuple(off)


def _hiding(options: list[str], shown_without: Callable[[list[str]], bool]) -> list[str]:
    """Return which of `options` must be off for everything to be shown: tried by halves, as few of many hide anything."""
    off = list(options)

    def try_on(names: list[str]) -> None:
        nonlocal off
        rest = [name for name in off if name not in names]
        if shown_without(rest):
            off = rest
        elif len(names) > 1:
            try_on(names[: len(names) // 2])
            try_on(names[len(names) // 2 :])

    try_on(options)
    return off


def _without(key: GraphKey, options: Iterable[str]) -> GraphKey:
    return replace(key, options=key.options.but(**{name: getattr(PLAIN, name) for name in options}))


def _token_axis(few: tuple[int, ...] | None, more: tuple[int, ...] | None) -> int | None:
    """Return the numpy axis of a value (ne reversed, four of them) that grew with the tokens."""
    grown = [i for i, (a, b) in enumerate(zip(few or (), more or ())) if a != b and any(a * m == b * f for f, m in zip(FEW, MORE))]
    return 3 - grown[0] if len(grown) == 1 else None


def _closest(pattern: str, names: Iterable[tuple[str, int]]) -> str:
    known = dict.fromkeys(name for name, _ in names)
    close = get_close_matches(pattern, known, n=4, cutoff=0.4)
    return f"close to it are {', '.join(close)}" if close else f"there are {len(known)} names, such as {', '.join(list(known)[:4])}"


def _glob(pattern: str) -> str:
    return pattern.partition("#")[0]


def trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop leading ones, as ggml's trailing ones are no dimensions."""
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape) - 1)
    return shape[first:]
