"""Tensor element types as the provider knows them, and conversion to and from them (level 1).

`types.F32`, `types.Q8_0` … are looked up in the provider, which is opened by the first look.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import TensorError
from ._native import ffi, lib
from .provider import provider

_by_id: dict[int, GgmlType] = {}
_by_name: dict[str, GgmlType] = {}


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One element type: `block_size` elements are stored in `type_size` bytes."""

    id: int
    name: str
    block_size: int
    type_size: int
    is_quantized: bool

    @staticmethod
    def of(key: int | str | GgmlType) -> GgmlType:
        """Return the type of a GGUF type id or a name such as "q8_0". Raises TensorError when the provider does not know it."""
        if isinstance(key, GgmlType):
            return key
        if not _by_id:
            _read_table()
        found = _by_id.get(key) if isinstance(key, int) else _by_name.get(str(key).lower())
        if found is None:
            raise TensorError(f"no tensor type {key!r} in ggml {provider().version}; known: {', '.join(_by_name)}")
        return found

    def row_size(self, n: int) -> int:
        """Return the bytes of a row of `n` elements. Raises TensorError when they do not fill whole blocks."""
        if n < 0 or n % self.block_size:
            raise TensorError(f"a row of {n} elements does not divide into {self.name} blocks of {self.block_size}")
        return n // self.block_size * self.type_size

    def __repr__(self) -> str:
        return self.name


def __getattr__(name: str) -> GgmlType:
    if not name.isupper():
        raise AttributeError(name)
    try:
        return GgmlType.of(name)
    except TensorError as error:
        raise AttributeError(str(error)) from None


def known() -> list[GgmlType]:
    """Return every type the provider knows, by id."""
    GgmlType.of(0)
    return list(_by_id.values())


def requires_imatrix(type: GgmlType) -> bool:
    """Tell whether `quantize` to this type needs an importance matrix."""
    return lib.ggml_quantize_requires_imatrix(type.id)


def quantize(type: GgmlType, x: np.ndarray, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Convert float32 [..., n] to raw bytes [..., row_size] by ggml's own code; imatrix [n] weighs the columns."""
    x = np.ascontiguousarray(x, np.float32)
    n = x.shape[-1]
    raw = np.empty((*x.shape[:-1], type.row_size(n)), np.uint8)
    if requires_imatrix(type) and imatrix is None:
        raise TensorError(f"{type.name} cannot be quantised without an importance matrix")
    weights = ffi.NULL
    if imatrix is not None:
        imatrix = np.ascontiguousarray(imatrix, np.float32)
        if imatrix.shape != (n,):
            raise TensorError(f"importance matrix of shape {imatrix.shape}, expected ({n},)")
        weights = ffi.from_buffer("float[]", imatrix)
    if x.size == 0:
        return raw
    if type.name == "f32":
        return x.view(np.uint8)
    if not type.is_quantized and type.name not in ("f16", "bf16"):
        raise TensorError(f"{type.name} is not a type of weights")
    lib.ggml_quantize_chunk(type.id, ffi.from_buffer("float[]", x), ffi.from_buffer(raw), 0, x.size // n, n, weights)
    return raw


def dequantize(type: GgmlType, raw: np.ndarray, n: int) -> np.ndarray:
    """Convert raw bytes [..., row_size(n)] to float32 [..., n]."""
    raw = np.ascontiguousarray(raw, np.uint8)
    row_size = type.row_size(n)
    if raw.shape[-1] != row_size:
        raise TensorError(f"a row of {n} {type.name} elements has {row_size} bytes, found {raw.shape[-1]}")
    if type.name == "f32":
        return raw.view(np.float32)
    x = np.empty((*raw.shape[:-1], n), np.float32)
    if x.size == 0:
        return x
    if lib.ggml_get_type_traits(type.id).to_float == ffi.NULL:
        raise TensorError(f"{type.name} has no conversion to float")
    lib.q_to_float(type.id, ffi.from_buffer(raw), ffi.from_buffer("float[]", x), row_size, n, x.size // n)
    return x


def _read_table() -> None:
    provider()
    params = ffi.new("struct ggml_init_params *", {"mem_size": 1 << 12, "mem_buffer": ffi.NULL, "no_alloc": True})
    ctx = lib.ggml_init(params[0])
    n_types = lib.q_count_types(ctx)
    lib.ggml_free(ctx)
    for i in range(n_types):
        traits = lib.ggml_get_type_traits(i)
        # types that were given up keep their number and lose their block size
        if traits.blck_size > 0 and traits.type_size > 0:
            known_type = GgmlType(i, ffi.string(traits.type_name).decode().lower(), traits.blck_size, traits.type_size, traits.is_quantized)
            _by_id[i] = _by_name[known_type.name] = known_type
