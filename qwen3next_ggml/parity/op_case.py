"""One case of an op check, and what every case is made from (level 11).

A case builds nodes on a `Graph` and says what they should give. Arrays are in numpy order, ggml's reversed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..ggml import types

F32_LIMIT = 1e-7
# a product of quantised weights also rounds the activations: what ggml's own test-backend-ops allows
QUANTISED_LIMIT = 5e-4
HALF_LIMIT = 1e-6
# and over float16 values the CPU adds up in float16
ATTENTION_LIMIT = 5e-4
# what a GPU may make of products: ggml lets it round float32 operands to float16, and add up products of float16 in float16
HALF_SUM_LIMIT = 2e-5


@dataclass(frozen=True)
class Case:
    """`build(g)` returns the node of one op and a function from its value to (got, want); `limit` is the NMSE allowed.

    `half_limit` is what a device that multiplies or adds in float16 is allowed, zero where none may.
    """

    op: str
    shape: str
    build: Callable
    limit: float = F32_LIMIT
    half_limit: float = 0.0


def rng_of(*key: int) -> np.random.Generator:
    """Return the generator of one shape: the same numbers in every run."""
    return np.random.default_rng(key)


def f32(x: np.ndarray) -> np.ndarray:
    """Return x as ggml will hold it."""
    return np.ascontiguousarray(x, np.float32)


def against(want: np.ndarray) -> Callable:
    """Compare all of a value with `want`, whatever its shape."""
    return lambda got: (got.reshape(-1), want.reshape(-1))


def stored(kind: str, x: np.ndarray) -> np.ndarray:
    """Return what a tensor of this type holds of x, in float64."""
    if kind in ("f32", "f16"):
        return x.astype({"f32": np.float32, "f16": np.float16}[kind]).astype(np.float64)
    type_ = types.GgmlType.of(kind)
    return types.dequantize(type_, types.quantize(type_, x), x.shape[-1]).astype(np.float64)
