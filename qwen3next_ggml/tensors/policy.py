"""How weights are brought into memory: which are rewritten for the CPU's kernels, which stay mapped (level 4).

Knows what was measured of ggml's versions and what a weight is used for; knows no file and moves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import OptionError
from ..machine import total_memory
from .table import Decl

KINDS = ("dense", "head", "expert")
# what is copied in a moment
SMALL = 256 << 20
# what every step reads whole; a copy lies in huge pages, which a mapped file has only by luck
EVERY_STEP = frozenset({"dense", "head"})
_HEADS = ("output", "nextn_shared_head_head")
# K-quants and their like; ggml's tiled kernels for x86 take them, from this version on, and pass by what is repacked
TILED_SINCE, TILED_ON = (0, 25), ("AVX", "AVX2", "AVX512")
TILED = frozenset("q2_k q3_k q4_k q5_k q6_k iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs".split())


@dataclass(frozen=True)
class LoadPolicy:
    """`repack`: kinds of products whose weights are rewritten → types that are not. `mmap`: what is not rewritten stays mapped,
    but for the kinds `copied`.

    `huge`: ask for huge pages. `why`: the reasons of what was chosen here and not by the caller.
    """

    repack: Mapping[str, frozenset[str]]
    mmap: bool
    copied: frozenset[str]
    huge: bool
    why: str

    def repacks(self, decl: Decl, type_name: str) -> bool:
        """Say whether a weight is to be rewritten, where the device has a layout for its type."""
        kind = kind_of(decl)
        return kind in self.repack and type_name not in self.repack[kind]


    def maps(self, decl: Decl) -> bool:
        """Say whether a weight that is not rewritten stays in the mapped file."""
        return self.mmap and kind_of(decl) not in self.copied


def kind_of(decl: Decl) -> str | None:
    """Return what a weight is multiplied as: "dense", "head" (the product with the whole vocabulary), "expert"; else None."""
    if decl.op == "mul_mat":
        return "head" if decl.attribute in _HEADS else "dense"
    return "expert" if decl.op == "mul_mat_id" else None


def choose_policy(version: str, features: Collection[str], nbytes: int, *, repack: bool | str, mmap: bool | str) -> LoadPolicy:
    """Return the policy for a file of `nbytes` over this version of ggml and these features of the CPU.

    repack: True, False, kinds joined by "+" such as "dense+head", or "auto", which goes by what was measured. mmap: True, False,
    or "auto": of files of more than SMALL bytes all is mapped but what every step reads whole. Raises OptionError for anything else.
    """
    if mmap not in (True, False, "auto"):
        raise OptionError(f"mmap is {mmap!r}, expected True, False or 'auto'")
    why, mapped, copied = [], mmap is True, frozenset()
    if mmap == "auto":
        mapped = nbytes > SMALL
        copied = EVERY_STEP if mapped else copied
        rest = "mapped but for what every step reads whole" if mapped else f"copied: below {SMALL >> 20} MiB a moment's work"
        why.append(f"{rest}; a copy lies in huge pages")
    if repack == "auto":
        kinds, reason = _measured(version, features)
        why.append(reason)
    elif isinstance(repack, bool):
        kinds = dict.fromkeys(KINDS if repack else (), frozenset())
    else:
        kinds = dict.fromkeys(repack.split("+") if isinstance(repack, str) else (), frozenset())
        if not kinds or not kinds.keys() <= set(KINDS):
            raise OptionError(f"repack is {repack!r}, expected True, False, 'auto' or kinds of {'+'.join(KINDS)}")
    return LoadPolicy(MappingProxyType(kinds), mapped, copied, nbytes <= total_memory(), "; ".join(why))


def _measured(version: str, features: Collection[str]) -> tuple[dict[str, frozenset[str]], str]:
    """Return which kinds to rewrite without which types, and why; docs/log.md has the figures.

    Experts are most of the bytes: rewriting them takes seconds per gigabyte, and they are multiplied row by row afterwards. The
    head is multiplied with single rows, where rewriting helps other types than K-quants.
    """
    number = tuple(int(part) for part in version.split("-")[0].split(".")[:2])
    if number >= TILED_SINCE and not set(TILED_ON).isdisjoint(features):
        reason = f"ggml {version} multiplies K-quants and IQ types fastest as they are stored, other types but experts are repacked"
        return dict.fromkeys(("dense", "head"), TILED), reason
    reason = "what is cheap to repack is: not the experts, and the head only where it helps single rows"
    return {"dense": frozenset(), "head": TILED}, reason
