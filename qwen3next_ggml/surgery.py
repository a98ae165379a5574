"""A model with its layers left out, repeated or reordered (level 5).

Layer i of the new model has the weights of layer `layers[i]` of the file and a state of its own. Knows no files and no graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index

from .errors import OptionError
from .ggml import Device
from .hparams import HParams
from .tensors import Weights


def chosen_layers(hp: HParams, layers: Sequence[int] | None, skip: Sequence[int]) -> tuple[int, ...] | None:
    """Return the file's layers to run, in order; None where they are those of the file. Raises OptionError."""
    every = range(hp.n_layer)
    wanted = tuple(every if layers is None else (_checked("layers", il, every) for il in layers))
    left_out = {_checked("skip", il, every) for il in skip}
    wanted = tuple(il for il in wanted if il not in left_out)
    if not wanted:
        raise OptionError(f"layers={layers} and skip={list(skip)} leave no layer of {hp.n_layer}")
    return None if wanted == tuple(every) else wanted


def _checked(option: str, il: int, every: range) -> int:
    try:
        known = index(il) in every
    except TypeError:
        known = False
    if not known:
        raise OptionError(f"{option}: there is no layer {il!r}; the model has 0 to {len(every) - 1}")
    return index(il)


def relayered(hp: HParams, layers: Sequence[int]) -> HParams:
    """Return the hyperparameters of the new model; it has no NextN block, which was trained on the layers as they were."""
    return replace(hp, n_layer_all=len(layers), n_layer_nextn=0, recurrent_layers=tuple(hp.recurrent_layers[il] for il in layers))


class RelayeredWeights:
    """The same weights with blocks under new numbers; everything else is that of `weights`."""

    def __init__(self, weights: Weights, layers: Sequence[int]):
        self._weights, self._layers = weights, tuple(layers)
        self.blk = [weights.blk[il] for il in layers]

    def __getattr__(self, name: str):
        return getattr(self._weights, name)

    def device_of(self, il: int) -> Device:
        """Return the device that holds block il, by its new number."""
        return self._weights.device_of(self._layers[il])
