"""Proof that a provider's ggml_tensor is laid out as this package was compiled for, on tensors made for the purpose (level 1).

A field that moved would turn every later read into garbage, so the provider is refused with the field's name.
"""

from __future__ import annotations

import struct

from ..errors import BackendError
from ._native import ffi, lib

F32, F16 = 0, 1


def probe(name: str, version: str) -> None:
    """Raise BackendError naming the first field of ggml_tensor or of the type table that is not where it should be."""
    with_data = ffi.new("struct ggml_init_params *", {"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": False})
    ctx = lib.ggml_init(with_data[0])
    try:
        wrong = [field for field, right in _fields(ctx).items() if not right]
    finally:
        lib.ggml_free(ctx)
    if wrong:
        raise BackendError(f"ggml provider {name} ({version}) lays out ggml_tensor differently: {', '.join(wrong)}; this package cannot run on it")


def _fields(ctx: object) -> dict[str, bool]:
    ne = ffi.new("int64_t[4]", [5, 7, 3, 2])
    a = lib.ggml_new_tensor(ctx, F16, 4, ne)
    b = lib.ggml_new_tensor(ctx, F32, 4, ne)
    lib.ggml_set_name(a, b"probe")
    lib.ggml_set_input(a)
    size, traits = ffi.sizeof("ggml_tensor"), lib.ggml_get_type_traits(F16)
    base = int(ffi.cast("uintptr_t", a))
    # the guarded calls want a context without data, and a known type
    lib.ggml_set_no_alloc(ctx, True)
    n_types = lib.q_count_types(ctx)
    view = lib.ggml_view_1d(ctx, a, 2, 6)
    scaled = lib.ggml_scale(ctx, b, 0.25)
    if n_types < 31 or not view or not scaled:
        return {"a view and a scale": False}
    return {
        "type": a.type == F16 and b.type == F32,
        "ne": list(a.ne) == [5, 7, 3, 2],
        "nb": list(a.nb) == [2, 10, 70, 210],
        "op": a.op == 0 and scaled.op != 0 and ffi.string(lib.ggml_op_desc(scaled)) == b"SCALE",
        "op_params": struct.pack("i", scaled.op_params[0]) == struct.pack("f", 0.25),
        "flags": a.flags == 1 and b.flags == 0,
        "src": scaled.src[0] == b and scaled.src[1] == ffi.NULL,
        "view_src": view.view_src == a and a.view_src == ffi.NULL,
        "view_offs": view.view_offs == 6,
        "data": int(ffi.cast("uintptr_t", a.data)) == base + size and view.data == ffi.cast("char *", a.data) + 6,
        "name": ffi.string(a.name) == b"probe",
        "size": lib.ggml_tensor_overhead() - size == 32,
        "type table": ffi.string(traits.type_name) == b"f16" and (traits.blck_size, traits.type_size) == (1, 2),
    }
