"""Warnings about a file that loads and may still be wrong (level 4).

Reads small tensors only; nothing here refuses a file.
"""

from __future__ import annotations

import numpy as np

from ..ggml import GgmlType, types
from ..gguf_file import GgufFile, TensorInfo
from .table import Checked, Decl

MIN_NORM_MEAN = 0.25  # final norm weights are centred near 1, unshifted ones near 0
MIN_GATE_BITS = 8


def warnings(file: GgufFile, checked: Checked) -> list[str]:
    """Return one sentence per suspicion: norms that miss their offset, gates of few bits, converted types, leftovers."""
    known = checked.found + checked.unloaded
    return [
        *_unshifted_norms(file, known),
        *_coarse_gates(known),
        *_converted(known),
        *([f"not used by this architecture: {', '.join(checked.leftovers)}"] if checked.leftovers else []),
    ]


def _unshifted_norms(file: GgufFile, known: tuple[tuple[Decl, TensorInfo], ...]) -> list[str]:
    norms = [info for decl, info in known if decl.role == "norm" or decl.role == "mtp" and decl.name.endswith("norm.weight")]
    low = [info.name for info in norms if _mean(file, info) < MIN_NORM_MEAN]
    if not low:
        return []
    return [
        f"norm weights centred at 0 instead of 1: {', '.join(low)}; a converter that did not add the offset "
        "of 1 writes such a file, and the model will produce noise"
    ]


def _mean(file: GgufFile, info: TensorInfo) -> float:
    return float(np.mean(types.dequantize(GgmlType.of(info.type_id), file.data(info.name), info.ne[0])))


def _coarse_gates(known: tuple[tuple[Decl, TensorInfo], ...]) -> list[str]:
    coarse = [f"{info.name} ({info.type_name})" for decl, info in known if _gates(decl) and _bits(info) < MIN_GATE_BITS]
    if not coarse:
        return []
    return [f"gates quantised below {MIN_GATE_BITS} bits: {', '.join(coarse)}; their error adds up along the sequence"]


def _gates(decl: Decl) -> bool:
    return decl.role in ("gate", "router") or decl.role == "mtp" and "gate_inp" in decl.name


def _bits(info: TensorInfo) -> float:
    type = GgmlType.of(info.type_id)
    return 8 * type.type_size / type.block_size


def _converted(known: tuple[tuple[Decl, TensorInfo], ...]) -> list[str]:
    stored = [f"{info.name} ({info.type_name})" for decl, info in known if decl.op is None and info.type_name != "f32"]
    return [f"converted to f32 at load: {', '.join(stored)}"] if stored else []
