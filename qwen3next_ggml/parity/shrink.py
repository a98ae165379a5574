"""The first difference of a comparison as one op: what it reads, of the reference where that has it, and what it should give (level 11)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import OptionError
from .apart import extract_apart
from .compare import BY_EXPERT, TOP_K, Joined, of_ubatch
from .one_op import REFERENCE, OneOp
from .recording import Recording
from .sides import SESSION, Run


def shrink(found: Joined, run: Run, wanted: Run | Recording, ours: Recording, theirs: Recording) -> OneOp:
    """Return the op behind the node that differs, with the reference's value of that node in the same ubatch.

    `run` is examined and gave `ours`, `wanted` is what it was compared with and gave `theirs`. The operands are those the
    examined graph has on the reference's device and libggml, and those of `run` itself where the reference is no session: it
    has no such op. Raises OptionError where no op made the node, else what sessions raise.
    """
    value = found.value
    if not value.op:
        raise OptionError(f"{value.name} has no op behind it that could be run alone: {ours.title} does not tell")
    there = isinstance(wanted, Run) and wanted.kind == SESSION
    options = tuple(ours.options.items())
    at = replace(run, options=options, **dict(device=wanted.device, ggml=wanted.ggml) if there else {})
    one = extract_apart(at, value.name, value.occurrence, found.ubatch)
    note = _note(found, ours, theirs, theirs.title if there else ours.title)
    return replace(one, note=note, arrays={**one.arrays, REFERENCE: _wanted(found, one, ours, theirs)})


def _wanted(found: Joined, one: OneOp, ours: Recording, theirs: Recording) -> np.ndarray:
    """Return the reference's value in the shape of the node, experts in the order the node has them."""
    value, shape = found.value, one.result.ne[::-1]
    want = of_ubatch(value, found.reference, ours.ubatches, found.ubatch)
    base, _, layer = value.name.rpartition("-")
    if base in BY_EXPERT:
        want = _in_order(want, *(_ids(side, f"{TOP_K}-{layer}", ours, found.ubatch) for side in (ours, theirs)))
    if value.axis is None:
        return want.reshape(shape)
    rows = want.reshape(shape[value.axis], *np.delete(shape, value.axis))
    return np.ascontiguousarray(np.moveaxis(rows, 0, value.axis))


def _ids(side: Recording, name: str, ours: Recording, ubatch: int) -> np.ndarray | None:
    found = next((value for value in side.values if value.name == name), None)
    return None if found is None else of_ubatch(found, found, ours.ubatches, ubatch)


def _in_order(rows: np.ndarray, ids: np.ndarray | None, theirs: np.ndarray | None) -> np.ndarray:
    """Put each row's experts, which come as `theirs`, in the order of `ids`."""
    if ids is None or theirs is None:
        return rows
    place = np.argsort(theirs.reshape(len(rows), -1), axis=1)
    place = np.take_along_axis(place, np.argsort(np.argsort(ids.reshape(len(rows), -1), axis=1), axis=1), axis=1)
    return np.take_along_axis(rows.reshape(*place.shape, -1), place[..., None], axis=1)


def _note(found: Joined, ours: Recording, theirs: Recording, read: str) -> str:
    value = found.value
    return "\n".join((
        f"{value.kernel or value.op} behind {value.name} #{value.occurrence}, the first node that differs; ubatch {found.ubatch}.",
        "",
        f"here       {ours.title}",
        f"reference  {theirs.title}",
        f"operands   as read by {read}",
        f"made by    {value.line or 'a line that was not noted'}",
        "Exit code: 0 the reference's value, 1 another one.",
        "",
    ))  # fmt: skip
