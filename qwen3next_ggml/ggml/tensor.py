"""Contexts that own tensor structs, and handles to single tensors with their data in numpy order (level 1).

Knows no operations and no backends: data goes through whatever buffer a tensor was placed in.
"""

from __future__ import annotations

import weakref

import numpy as np

from ..errors import BackendError, GraphError, TensorError
from ._native import ffi, lib
from .provider import failure, provider
from .types import GgmlType, dequantize

_NUMPY = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "f64": np.float64}
_NULL = ffi.NULL

_contexts: weakref.WeakSet[Context] = weakref.WeakSet()


class Context:
    """Owner of tensor structs and graphs, without their data: room for `n_tensors`, and for graphs of `graph_size` nodes in all.

    Closing it makes its tensors unusable; their memory goes when the last handle does.
    """

    __slots__ = ("__weakref__", "_free", "_p", "_span", "n_tensors")

    def __init__(self, n_tensors: int, graph_size: int = 0):
        provider()
        size = n_tensors * lib.ggml_tensor_overhead() + (lib.ggml_graph_overhead_custom(graph_size, False) if graph_size else 0)
        params = ffi.new("struct ggml_init_params *", {"mem_size": max(size, 1024), "mem_buffer": _NULL, "no_alloc": True})
        self._p = lib.ggml_init(params[0])
        if self._p == _NULL:
            raise BackendError(f"no memory for {n_tensors} tensors ({size} bytes)")
        self.n_tensors = n_tensors
        start = int(ffi.cast("uintptr_t", lib.ggml_get_mem_buffer(self._p)))
        self._span = range(start, start + lib.ggml_get_mem_size(self._p))
        _contexts.add(self)
        self._free = weakref.finalize(self, lib.ggml_free, self._p)
        # host memory needs no freeing at exit, and handles may still be looked at
        self._free.atexit = False

    def new_tensor(self, type: GgmlType, *ne: int, name: str | None = None) -> Tensor:
        """Make a tensor of one to four dimensions in ggml order, without data. Raises GraphError when the context is full or closed."""
        if not 1 <= len(ne) <= 4:
            raise GraphError(f"new_tensor: {len(ne)} dimensions, expected 1 to 4")
        if min(ne) < 0 or ne[0] % type.block_size:
            raise GraphError(f"new_tensor: no {type.name} tensor of {list(ne)}; rows are made of blocks of {type.block_size}")
        p = lib.ggml_new_tensor_4d(self._p, type.id, *ne, *(1,) * (4 - len(ne)))
        if not p:
            raise GraphError(f"new_tensor {type.name} {list(ne)}: {self.why()}")
        tensor = Tensor(p, self)
        if name is not None:
            tensor.name = name
        return tensor

    def new_part(self, whole: Tensor, start: int, n: int, *, name: str, matrices: range | None = None) -> Tensor:
        """Make a tensor of the `n` rows of whole [n_in, n_out, …] from `start` on, in its memory: a leaf of graphs, where a view is a node.

        `matrices`: of those only, instead of all. Raises GraphError when these rows are not all there, or the context is full or closed.
        """
        (n_in, n_out, n_matrices, ne3), nb = whole.ne, whole.nb
        matrices = range(n_matrices) if matrices is None else matrices
        if start < 0 or n < 1 or start + n > n_out or matrices.start < 0 or not len(matrices) or matrices.stop > n_matrices:
            raise GraphError(f"new_part: rows {start} to {start + n} of matrices {matrices.start} to {matrices.stop} of {whole!r}")
        part = self.new_tensor(whole.type, n_in, n, len(matrices), ne3, name=name)
        part._p.nb, part._p.view_src, part._p.view_offs = nb, whole._p, start * nb[1] + matrices.start * nb[2]
        return part

    def handle(self, p: object) -> Tensor:
        """Return a handle to a tensor of this context or of another one that is still held."""
        address = int(ffi.cast("uintptr_t", p))
        if address in self._span:
            return Tensor(p, self)
        return Tensor(p, next((context for context in list(_contexts) if address in context._span), self))

    @property
    def tensors(self) -> list[Tensor]:
        """Return every tensor made in this context, in order."""
        found, p = [], lib.ggml_get_first_tensor(self._p)
        while p:
            found.append(Tensor(p, self))
            p = lib.ggml_get_next_tensor(self._p, p)
        return found

    @property
    def closed(self) -> bool:
        return not lib.ggml_get_no_alloc(self._p)

    def why(self) -> str:
        """Return why the last call on this context failed, in words about this context when it is full."""
        text = failure()
        full = "obj_new" in text
        return f"the context is full, it was made for {self.n_tensors} tensors" if full else text

    def close(self) -> None:
        """Make the tensors of this context unusable. Closing twice does nothing."""
        if not self.closed:
            lib.q_close_context(self._p)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Tensor:
    """Handle to one ggml tensor: no data of its own, equal to every other handle of the same tensor."""

    __slots__ = ("_p", "context")

    def __init__(self, p: object, context: Context):
        self._p = p
        self.context = context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self._p == other._p

    def __hash__(self) -> int:
        return hash(self._p)

    def __repr__(self) -> str:
        if self._p.type < 0:
            return "Tensor of a closed context"
        return f"Tensor({self.name or '-'}: {self.described}, {self.op})"

    @property
    def described(self) -> str:
        """Type and shape for a message, in ggml order."""
        return f"{self.type.name} {list(self.shape)}" if self._p.type >= 0 else "of a closed context"

    @property
    def ptr(self) -> int:
        """The address of the struct, for libraries that speak ggml themselves."""
        return int(ffi.cast("uintptr_t", self._p))

    @property
    def name(self) -> str:
        return ffi.string(self._p.name).decode(errors="replace")

    @name.setter
    def name(self, name: str) -> None:
        lib.ggml_set_name(self._p, name.encode())

    @property
    def type(self) -> GgmlType:
        return GgmlType.of(self._p.type)

    @property
    def op(self) -> str:
        """What makes the tensor: "NONE", "MUL_MAT", "VIEW", or the kind of a unary or gated op such as "SILU", "SWIGLU"."""
        return ffi.string(lib.ggml_op_desc(self._p)).decode()

    @property
    def ne(self) -> tuple[int, int, int, int]:
        return tuple(self._p.ne)

    @property
    def nb(self) -> tuple[int, int, int, int]:
        return tuple(self._p.nb)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions in ggml order without trailing ones, at least one."""
        ne = self.ne
        n = 4
        while n > 1 and ne[n - 1] == 1:
            n -= 1
        return ne[:n]

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last, gaps included."""
        return lib.ggml_nbytes(self._p)

    @property
    def nelements(self) -> int:
        return lib.ggml_nelements(self._p)

    @property
    def nrows(self) -> int:
        """Return ne1 · ne2 · ne3."""
        return lib.ggml_nrows(self._p)

    @property
    def is_contiguous(self) -> bool:
        return lib.ggml_is_contiguous(self._p)

    @property
    def view_src(self) -> Tensor | None:
        p = self._p.view_src
        return self.context.handle(p) if p else None

    @property
    def view_offs(self) -> int:
        return self._p.view_offs

    @property
    def src(self) -> list[Tensor]:
        """The operands, in ggml's order."""
        return [self.context.handle(p) for p in self._p.src if p]

    @property
    def op_params(self) -> bytes:
        """The 64 bytes of parameters ggml keeps with a node."""
        return bytes(ffi.buffer(self._p.op_params))

    @property
    def data(self) -> int:
        """The address of the data, 0 before the tensor is placed."""
        return int(ffi.cast("uintptr_t", self._p.data))

    @property
    def is_input(self) -> bool:
        return bool(self._p.flags & 1)

    @property
    def is_output(self) -> bool:
        return bool(self._p.flags & 2)

    def set(self, array: np.ndarray, offset: int = 0) -> None:
        """Copy an array into the data, `offset` bytes in. Raises TensorError when type or size do not fit, BackendError when unplaced.

        The dtype is the tensor's own, or uint8 for raw bytes. Indices must be below the limit of every node built on them, else GraphError.
        """
        self._check_open("set")
        array = np.ascontiguousarray(array)
        wanted = _NUMPY.get(self.type.name, np.uint8)
        if array.dtype not in (wanted, np.uint8):
            raise TensorError(f"set {self!r}: array of {array.dtype}, expected {np.dtype(wanted)} or raw uint8")
        self._check_range("set", offset, array.nbytes)
        if not self.is_contiguous:
            raise TensorError(f"set {self!r}: its elements are not adjacent")
        raw = ffi.from_buffer(array)
        if not lib.q_indices_fit(self._p, raw, array.nbytes):
            raise GraphError(f"set: {failure()}")
        if array.nbytes:
            lib.ggml_backend_tensor_set(self._p, raw, offset, array.nbytes)

    def get(self) -> np.ndarray:
        """Copy the data out in numpy order (ne reversed, without the ones that `shape` drops): float32 for float and quantised types, ints for ints."""
        self._check_open("get")
        shape, kind = self.shape[::-1], self.type
        if self.nelements == 0:
            return np.empty(shape, _NUMPY.get(kind.name, np.float32))
        self._check_range("get", 0, self.nbytes)
        self._check_readable("get")
        raw = np.empty(self.nbytes, np.uint8)
        lib.ggml_backend_tensor_get(self._p, ffi.from_buffer(raw), 0, raw.nbytes)
        if kind.name in _NUMPY:
            strides = self.nb[: len(shape)][::-1]
            array = np.ndarray(shape, _NUMPY[kind.name], raw, strides=strides)
            return np.ascontiguousarray(array, np.float32 if kind.name == "f16" else None)
        return self._get_rows(raw, shape)

    def _check_readable(self, what: str) -> None:
        """Refuse data that lies in a layout of the CPU's own kernels: ggml has no way back and calls a null pointer."""
        p = self._p.view_src or self._p
        if p.extra and p.buffer:
            memory = ffi.string(lib.ggml_backend_buft_name(lib.ggml_backend_buffer_get_type(p.buffer))).decode()
            if memory.startswith("CPU_"):
                raise BackendError(f"{what} {self!r}: it was repacked as {memory} and cannot be read back; load with repack=False")

    def _get_rows(self, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        kind, nb = self.type, self.nb
        if nb[0] != kind.type_size:
            raise TensorError(f"get {self!r}: rows of {kind.name} whose elements are not adjacent")
        row = kind.row_size(shape[-1])
        rows = np.ndarray((*shape[:-1], row), np.uint8, raw, strides=(*nb[1 : len(shape)][::-1], 1))
        return dequantize(kind, rows, shape[-1])

    def raw(self, offset: int = 0, size: int | None = None) -> np.ndarray:
        """Copy `size` bytes (the rest by default) out as they are stored -> uint8 [size]."""
        self._check_open("raw")
        size = self.nbytes - offset if size is None else size
        self._check_range("raw", offset, size)
        self._check_readable("raw")
        out = np.empty(size, np.uint8)
        if size:
            lib.ggml_backend_tensor_get(self._p, ffi.from_buffer(out), offset, size)
        return out

    def memory(self) -> memoryview | None:
        """Return the data as memory to write into, None where the host does not reach it or it is laid out in the device's own way."""
        self._check_open("memory")
        self._check_range("memory", 0, self.nbytes)
        if not lib.ggml_backend_buffer_is_host((self._p.view_src or self._p).buffer):
            return None
        return memoryview(ffi.buffer(self._p.data, self.nbytes))

    def memset(self, value: int, offset: int = 0, size: int | None = None) -> None:
        """Fill `size` bytes (the rest by default) with one byte."""
        self._check_open("memset")
        size = self.nbytes - offset if size is None else size
        self._check_range("memset", offset, size)
        lib.ggml_backend_tensor_memset(self._p, value, offset, size)

    def _check_open(self, doing: str) -> None:
        if not lib.q_is_open(self._p):
            raise TensorError(f"{doing}: the tensor belongs to a closed context")

    def _check_range(self, doing: str, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise TensorError(f"{doing} {self!r}: bytes {offset} to {offset + size} of {self.nbytes}")
        if not self._p.data or not (self._p.view_src.buffer if self._p.view_src else self._p.buffer):
            raise BackendError(f"{doing} {self!r}: it has not been placed in a buffer")
