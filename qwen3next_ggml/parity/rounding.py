"""The quantised weight behind a difference: kernels round what they multiply with one, each in its own way (level 11)."""

from __future__ import annotations

import os

from ..gguf_file import GgufFile
from ..model import embedded_model
from .compare import Joined

# of these a kernel takes products as they are
WHOLE = frozenset({"f64", "f32", "f16", "bf16"})
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")


def quantised_weight(found: Joined, path: str | os.PathLike | None) -> tuple[str, str] | None:
    """Return name and type of the quantised tensor of the file in the product behind a node; None where it is no such product.

    `path` None is the embedded model. Raises what `GgufFile.open` raises.
    """
    if found.value.kernel not in PRODUCTS:
        return None
    with GgufFile.open(path or embedded_model()) as file:
        read = (file.tensors[name] for name, _ in found.value.inputs if name in file.tensors)
        return next(((info.name, info.type_name) for info in read if info.type_name not in WHOLE), None)
