"""Devices, their kinds of memory, and buffers of it that tensors are placed in (level 1).

Knows no graphs. A buffer is freed when closed; tensors in it must not be used afterwards.
"""

from __future__ import annotations

from ..errors import BackendError, TensorError
from ._native import ffi, lib
from .ops import Ops
from .owned import Owned
from .provider import failure, provider
from .tensor import Context, Tensor
from .types import GgmlType

KINDS = ("cpu", "gpu", "igpu", "accel", "meta")
USAGES = {"any": 0, "weights": 1, "compute": 2}
_NULL = ffi.NULL


class Device:
    """A device of the provider: the CPU, a GPU, an accelerator beside the CPU."""

    __slots__ = ("_p", "description", "kind", "name")

    def __init__(self, p: object):
        self._p = p
        self.name = ffi.string(lib.ggml_backend_dev_name(p)).decode()
        self.description = ffi.string(lib.ggml_backend_dev_description(p)).decode(errors="replace")
        self.kind = KINDS[lib.ggml_backend_dev_type(p)]

    def __repr__(self) -> str:
        return f"Device({self.name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self._p == other._p

    def __hash__(self) -> int:
        return hash(self._p)

    @property
    def library(self) -> str:
        """The file the device's code lives in."""
        file = lib.q_file_of(lib.ggml_backend_reg_get_proc_address(self._registry, b"ggml_backend_set_n_threads"))
        return ffi.string(file).decode() if file else provider().folder

    @property
    def features(self) -> dict[str, str]:
        """What the device's code was built for or found on this machine, such as AVX2; empty when it does not say."""
        found, features = {}, lib.q_features(self._registry)
        while features and features.name:
            found[ffi.string(features.name).decode()] = ffi.string(features.value).decode()
            features += 1
        return found

    @property
    def maps_host_memory(self) -> bool:
        """Whether `buffer_from_host` works."""
        props = ffi.new("struct ggml_backend_dev_props *")
        lib.ggml_backend_dev_get_props(self._p, props)
        return bool(props.buffer_from_host_ptr)

    @property
    def keeps_bindings(self) -> bool:
        """Whether the driver goes through bindings of earlier graphs, whose buffers may be gone, and crashes: see `Backend.renew`."""
        # Mesa's software Vulkan looks at every binding of a set, whether the shader uses it or not
        return "llvmpipe" in self.description

    def memory(self) -> tuple[int, int]:
        """Return free and total memory in bytes."""
        both = ffi.new("size_t[2]")
        lib.ggml_backend_dev_memory(self._p, both, both + 1)
        return both[0], both[1]

    def init(self):
        """Return a new Backend that computes on this device."""
        from .backend import Backend

        return Backend(self)

    def buffer_type(self) -> BufferType:
        """Return the device's own memory."""
        return BufferType(lib.ggml_backend_dev_buffer_type(self._p))

    def host_buffer_type(self) -> BufferType | None:
        """Return host memory the device reads fast, None when it has no such kind."""
        p = lib.ggml_backend_dev_host_buffer_type(self._p)
        return BufferType(p) if p else None

    def extra_buffer_types(self) -> list[BufferType]:
        """Return memory that stores weights in another arrangement, such as CPU_REPACK."""
        found, p = [], lib.q_extra_buffer_types(self._p)
        while p and p[0]:
            found.append(BufferType(p[0]))
            p += 1
        return found

    def supports_op(self, tensor: Tensor) -> bool:
        """Tell whether the device can compute a node with its operands where they are."""
        return lib.ggml_backend_dev_supports_op(self._p, tensor._p)

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """Tell whether nodes on the device may read tensors in that memory."""
        return lib.ggml_backend_dev_supports_buft(self._p, buffer_type._p)

    def buffer_from_host(self, address: int, size: int, keep: object = None) -> Buffer:
        """Return a buffer over memory that exists already, without a copy; `keep` is held until the buffer is closed.

        Raises BackendError when the device cannot.
        """
        if not self.maps_host_memory:
            raise BackendError(f"device {self.name} cannot use host memory in place")
        if size <= 0 or address % self.buffer_type().alignment:
            raise BackendError(f"{size} bytes of host memory at {address:#x}; device {self.name} needs some, aligned to {self.buffer_type().alignment}")
        p = lib.ggml_backend_dev_buffer_from_host_ptr(self._p, ffi.cast("void *", address), size, size)
        if not p:
            raise BackendError(f"device {self.name} could not map {size} bytes of host memory")
        return Buffer(p, keep)

    @property
    def _registry(self) -> object:
        return lib.ggml_backend_dev_backend_reg(self._p)


def devices() -> list[Device]:
    """Return the provider's devices, in its order."""
    provider()
    return [Device(lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count())]


def device(name: str) -> Device:
    """Return a device by its name, in any case. Raises BackendError listing what exists."""
    found = devices()
    for one in found:
        if one.name.lower() == name.lower():
            return one
    raise BackendError(f"no device {name}; ggml provider {provider().name} has: {', '.join(one.name for one in found)}")


class BufferType:
    """A kind of memory. `supports` tells which weights may live in it."""

    __slots__ = ("_p", "alignment", "is_host", "max_size", "name")

    def __init__(self, p: object):
        self._p = p
        self.name = ffi.string(lib.ggml_backend_buft_name(p)).decode()
        self.alignment = lib.ggml_backend_buft_get_alignment(p)
        self.max_size = lib.ggml_backend_buft_get_max_size(p)
        self.is_host = lib.ggml_backend_buft_is_host(p)

    def __repr__(self) -> str:
        return f"BufferType({self.name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BufferType) and self._p == other._p

    def __hash__(self) -> int:
        return hash(self._p)

    def alloc(self, size: int) -> Buffer:
        """Return a new buffer. Raises BackendError when there is no room."""
        p = lib.ggml_backend_buft_alloc_buffer(self._p, size)
        if not p:
            raise BackendError(f"cannot allocate {size / 2**20:.1f} MiB in {self.name}")
        return Buffer(p)

    def alloc_size(self, tensor: Tensor) -> int:
        """Return the bytes a tensor takes in this memory, padding included."""
        return lib.ggml_backend_buft_get_alloc_size(self._p, tensor._p)

    def supports(self, device: Device, weight_type: GgmlType, ne: tuple[int, ...], op: str = "mul_mat", *, n_used: int = 1) -> bool:
        """Tell whether a device can run "mul_mat", "mul_mat_id" or "get_rows" on weights of this type and shape in this memory.

        As llama.cpp asks before it loads: with a weight in an empty buffer of this kind.
        """
        with Context(8) as context, self.alloc(0) as empty:
            g, n = Ops(context), 512
            f32, i32 = GgmlType.of("f32"), GgmlType.of("i32")
            weight = context.new_tensor(weight_type, *ne)
            if op == "mul_mat":
                node = g.mul_mat(weight, context.new_tensor(f32, ne[0], n, *ne[2:]))
            elif op == "mul_mat_id":
                node = g.mul_mat_id(weight, context.new_tensor(f32, ne[0], n_used, n), context.new_tensor(i32, n_used, n))
            elif op == "get_rows":
                node = g.get_rows(weight, context.new_tensor(i32, n))
            else:
                raise BackendError(f"no weights are used by {op}: ask for mul_mat, mul_mat_id or get_rows")
            weight._p.buffer = empty._p
            return device.supports_op(node)


class Buffer(Owned):
    """A block of a device's memory. Closing it takes the data from the tensors placed in it."""

    __slots__ = ("_contexts", "_p", "size")

    def __init__(self, p: object, keep: object = None):
        self._p = p
        self.size = lib.ggml_backend_buffer_get_size(p)
        self._contexts: set[Context] = set()
        self._own(_free_buffer, p, self._contexts, keep)

    @property
    def base(self) -> int:
        return int(ffi.cast("uintptr_t", lib.ggml_backend_buffer_get_base(self._open())))

    @property
    def type(self) -> BufferType:
        return BufferType(lib.ggml_backend_buffer_get_type(self._open()))

    def place(self, tensor: Tensor, offset: int) -> None:
        """Let a tensor's data be the bytes from `offset` on. Raises BackendError when they are outside or not aligned, or it has data already."""
        p = self._open()
        if not lib.q_is_open(tensor._p):
            raise TensorError("place: the tensor belongs to a closed context")
        size = lib.ggml_backend_buffer_get_alloc_size(p, tensor._p)
        if offset < 0 or offset + size > self.size:
            raise BackendError(f"place {tensor!r}: bytes {offset} to {offset + size} of a buffer of {self.size}")
        address = self.base + offset
        alignment = self._alignment_of(tensor)
        if address % alignment:
            raise BackendError(f"place {tensor!r}: offset {offset} is not aligned to {alignment} bytes")
        if tensor._p.data or tensor._p.view_src:
            raise BackendError(f"place {tensor!r}: it has data already, or is a view")
        if not lib.q_place(p, tensor._p, ffi.cast("void *", address)):
            raise BackendError(f"place {tensor!r}: {failure()}")
        self._contexts.add(tensor.context)

    def clear(self, byte: int = 0) -> None:
        """Fill the whole buffer with one byte."""
        lib.ggml_backend_buffer_clear(self._open(), byte)

    def set_usage(self, usage: str) -> None:
        """Tell ggml what the buffer holds: "weights", "compute" or "any"."""
        lib.ggml_backend_buffer_set_usage(self._open(), USAGES[usage])

    def hold(self, context: Context) -> None:
        """Note that tensors of a context lie in this buffer."""
        self._contexts.add(context)

    def _alignment_of(self, tensor: Tensor) -> int:
        """The CPU reads elements wherever they are aligned as such, as in mapped files; other memory has a rule of its own."""
        size = tensor.type.type_size
        return min(size & -size, 8) if lib.ggml_backend_buffer_is_host(self._p) else self.type.alignment

    def _open(self) -> object:
        if self.closed:
            raise BackendError("the buffer is closed")
        return self._p


def alloc_tensors(context: Context, buffer_type: BufferType) -> Buffer | None:
    """Allocate one buffer for all tensors of a context that have no data; None when there are none. Raises BackendError when there is no room."""
    if context.closed:
        raise TensorError("alloc_tensors: the context is closed")
    waiting = [t for t in context.tensors if not t.data and not t.view_src and t.nelements]
    p = lib.q_alloc_tensors(context._p, buffer_type._p)
    if not p and waiting:
        wanted = sum(buffer_type.alloc_size(t) for t in waiting)
        raise BackendError(f"cannot allocate {wanted / 2**20:.1f} MiB in {buffer_type.name}")
    if not p:
        return None
    buffer = Buffer(p)
    buffer.hold(context)
    return buffer


def _free_buffer(p: object, contexts: set[Context], keep: object) -> None:
    for context in contexts:
        lib.q_forget_buffer(context._p, p)
    lib.ggml_backend_buffer_free(p)
