"""The only package that speaks C: ggml's tensors, operations, devices and memory as Python objects (level 1)."""

try:
    from . import _native  # noqa: F401
except ImportError as error:
    raise ImportError(f"qwen3next_ggml's native module is not built ({error}); in the checkout: pip install --no-build-isolation -e .") from error

from . import types
from .backend import Backend
from .cgraph import Graph
from .device import Buffer, BufferType, Device, alloc_tensors, device, devices
from .excerpt import Excerpt
from .ops import (
    PREC_DEFAULT,
    PREC_F32,
    ROPE_IMROPE,
    ROPE_MROPE,
    ROPE_NEOX,
    ROPE_NORMAL,
    ROPE_VISION,
    SORT_ASC,
    SORT_DESC,
    TRI_LOWER,
    TRI_LOWER_DIAG,
    TRI_UPPER,
    TRI_UPPER_DIAG,
    Ops,
)
from .pages import advise_huge_pages
from .provider import Provider, provider
from .scheduler import GraphAllocator, Scheduler
from .step import Step
from .tensor import Context, Tensor
from .types import GgmlType

__all__ = [
    "PREC_DEFAULT", "PREC_F32", "ROPE_IMROPE", "ROPE_MROPE", "ROPE_NEOX", "ROPE_NORMAL", "ROPE_VISION", "SORT_ASC", "SORT_DESC",
    "TRI_LOWER", "TRI_LOWER_DIAG", "TRI_UPPER", "TRI_UPPER_DIAG",
    "Backend", "Buffer", "BufferType", "Context", "Device", "Excerpt", "GgmlType", "Graph", "GraphAllocator", "Ops", "Provider", "Scheduler",
    "Step", "Tensor", "advise_huge_pages", "alloc_tensors", "device", "devices", "provider", "types",
]  # fmt: skip
