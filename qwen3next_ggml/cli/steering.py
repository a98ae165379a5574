"""Control vectors, under llama.cpp's spelling (level 12)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import click

from .options import grouped, option


@dataclass(frozen=True)
class SteeringOptions:
    """Files with their scales, and the layers they act on."""

    files: tuple[tuple[str, float], ...]
    layers: tuple[int, int] | None

    def on(self, session) -> AbstractContextManager:
        """Return a block in which the vectors act on a session. Raises GgufError, OptionError."""
        if not self.files:
            return nullcontext()
        from functools import reduce
        from operator import add

        from ..steering import control_vector

        vector = reduce(add, (control_vector(path, scale=scale) for path, scale in self.files))
        if self.layers:
            start, end = self.layers
            # 0 and below stand for the first and the last layer, as in llama.cpp
            vector = vector.within(max(start, 1), end if end > 0 else session.hparams.n_layer)
        return vector.on(session)


class Scaled(click.ParamType):
    """FNAME:SCALE, several of them separated by commas."""

    name = "scaled"

    def convert(self, value, param, ctx):
        return [self._one(item, param, ctx) for item in value.split(",")]

    def _one(self, item: str, param, ctx) -> tuple[str, float]:
        path, _, scale = item.rpartition(":")
        try:
            return path or self.fail(f"{item!r}, expected FNAME:SCALE", param, ctx), float(scale)
        except ValueError:
            self.fail(f"{item!r}: {scale!r} is not a number, expected FNAME:SCALE", param, ctx)


def _steering(plain: tuple[str, ...], scaled: tuple, layers: tuple[int, int] | None) -> SteeringOptions:
    files = [(path, 1.0) for value in plain for path in value.split(",")] + [item for value in scaled for item in value]
    if layers and not files:
        raise click.UsageError("--control-vector-layer-range does nothing without --control-vector")
    return SteeringOptions(tuple(files), layers)


steering_options = grouped(
    "steering", _steering,
    option("--control-vector", "plain", multiple=True, metavar="FNAME,…",
           help="a GGUF file of directions to add to what layers put out; several add up"),
    option("--control-vector-scaled", "scaled", type=Scaled(), multiple=True, metavar="FNAME:SCALE,…", help="the same, times SCALE"),
    option("--control-vector-layer-range", "layers", type=(int, int), metavar="START END",
           help="layers they act on, both included  [default: all]"),
)  # fmt: skip
