"""How weights are brought into memory: which are rewritten for the CPU's kernels, which stay mapped (level 4).

Knows what was measured of ggml's versions and what a weight is used for; knows no file and moves nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import OptionError
from .table import Decl

KINDS = ("dense", "head", "expert")
_HEADS = ("output", "nextn_shared_head_head")


@dataclass(frozen=True)
class LoadPolicy:
    """`repack`: kinds of products whose weights are rewritten. `mmap`: others stay mapped. `huge`: ask for huge pages."""

    repack: frozenset[str]
    mmap: bool
    huge: bool
    why: str

    def repacks(self, decl: Decl) -> bool:
        """Say whether a weight is to be rewritten, where its type and the device allow it."""
        return kind_of(decl) in self.repack


def kind_of(decl: Decl) -> str | None:
    """Return what a weight is multiplied as: "dense", "head" (the product with the whole vocabulary), "expert"; else None."""
    if decl.op == "mul_mat":
        return "head" if decl.attribute in _HEADS else "dense"
    return "expert" if decl.op == "mul_mat_id" else None


def choose_policy(version: str, nbytes: int, *, repack: bool | str, mmap: bool) -> LoadPolicy:
    """Return the policy for a file of `nbytes` over this version of ggml.

    repack: True, False, kinds joined by "+" such as "dense+head", or "auto", which goes by what was measured.
    Raises OptionError for anything else.
    """
    huge = nbytes <= _memory()
    if repack == "auto":
        kinds, why = _measured(version)
        return LoadPolicy(kinds, mmap, huge, f"repack auto: {why}")
    if isinstance(repack, bool):
        return LoadPolicy(frozenset(KINDS if repack else ()), mmap, huge, "")
    named = repack.split("+") if isinstance(repack, str) else []
    if not named or not set(named) <= set(KINDS):
        raise OptionError(f"repack is {repack!r}, expected True, False, 'auto' or kinds of {'+'.join(KINDS)}")
    return LoadPolicy(frozenset(named), mmap, huge, "")


def _measured(version: str) -> tuple[frozenset[str], str]:
    """Return what pays on a CPU, and why; docs/log.md has the figures."""
    return frozenset(), ""


def _memory() -> int:
    """Return the machine's bytes of memory; a file beyond them is read in small pieces, and kept so."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
