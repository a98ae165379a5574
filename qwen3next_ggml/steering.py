"""Directions added to what layers put out, from GGUF files of architecture `controlvector` (level 9).

Reads such files as llama.cpp does; is handed sessions, makes none, and acts through their patches alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from .errors import GgufError, OptionError
from .gguf_file import GgufFile
from .ggml import Tensor


@dataclass(frozen=True, eq=False)
class ControlVector:
    """Directions [n_embd] by layer; `with vector.on(session):` adds direction N to l_out-N. Vectors can be added up and scaled."""

    directions: Mapping[int, np.ndarray]

    @property
    def n_embd(self) -> int:
        return len(next(iter(self.directions.values())))

    def __add__(self, other: ControlVector) -> ControlVector:
        if other.n_embd != self.n_embd:
            raise OptionError(f"control vectors of width {self.n_embd} and {other.n_embd} cannot be added")
        both = sorted(self.directions.keys() | other.directions.keys())
        return replace(self, directions={il: self.directions.get(il, 0) + other.directions.get(il, 0) for il in both})

    def __mul__(self, scale: float) -> ControlVector:
        return replace(self, directions={il: np.float32(scale) * x for il, x in self.directions.items()})

    def within(self, start: int, end: int) -> ControlVector:
        """Return the directions of layers `start` to `end`, both included. Raises OptionError where there are none."""
        inside = {il: x for il, x in self.directions.items() if start <= il <= end}
        if not inside:
            raise OptionError(f"the control vector has no direction for layers {start} to {end}: it has {_listed(self.directions)}")
        return replace(self, directions=inside)

    @contextmanager
    def on(self, session) -> Iterator[None]:
        """Add the directions in every run of `session` inside the block.

        Directions of layers the model has not are left out, as llama.cpp does. Raises OptionError for another width than the
        model's, or where no direction is left.
        """
        hp = session.hparams
        if self.n_embd != hp.n_embd:
            raise OptionError(f"the control vector is {self.n_embd} wide, the model {hp.n_embd}")
        directions = self.within(0, hp.n_layer - 1).directions

        def add(g, x: Tensor) -> Tensor:
            direction = directions.get(int(x.name.rpartition("-")[2]))
            # named after its place among the inputs, so that vectors inside each other stay apart
            return x if direction is None else g.add(x, g.input(f"{x.name} direction {len(g.inputs)}", direction))

        with session.patch("l_out-*", add):
            yield


def control_vector(path: str | os.PathLike, *, scale: float = 1.0) -> ControlVector:
    """Read the F32 tensors `direction.N` [n_embd] of a GGUF file, times `scale`; N is at least 1 as in llama.cpp.

    Raises GgufError for a file that holds anything else.
    """
    file = GgufFile.open(path)
    try:
        directions = {_layer(path, info): file.data(info.name).view(np.float32).copy() for info in file.tensors.values()}
    finally:
        file.close()
    if not directions:
        raise GgufError(f"{path} holds no tensors, expected direction.1 and so on")
    if len({len(x) for x in directions.values()}) > 1:
        raise GgufError(f"{path}: directions are {sorted({len(x) for x in directions.values()})} wide, expected one width")
    return ControlVector(dict(sorted(directions.items()))) * scale


def _layer(path: str | os.PathLike, info) -> int:
    kind, _, number = info.name.partition(".")
    if kind != "direction" or not number.isdecimal() or int(number) < 1:
        raise GgufError(f"{path}: tensor {info.name!r}, expected direction.N with N at least 1")
    if info.type_name != "f32" or len(info.ne) != 1:
        raise GgufError(f"{path}: {info.name} is {info.type_name} {list(info.ne)}, expected one row of f32")
    return int(number)


def _listed(directions: Mapping[int, np.ndarray]) -> str:
    return ", ".join(map(str, directions))
