"""How weights are brought into memory: which are rewritten for the CPU's kernels, which stay mapped (level 4).

Knows what was measured of ggml's versions and what a weight is used for; knows no file and moves nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..errors import OptionError
from ..machine import total_memory
from .table import Decl

KINDS = ("dense", "head", "expert")
# what is copied in a moment
SMALL = 256 << 20
# what every step reads whole, and cheap to rewrite: experts are most of the bytes, take seconds per gigabyte and are multiplied row by
# row afterwards. A copy lies in huge pages, which a mapped file has only by luck
EVERY_STEP = frozenset({"dense", "head"})
_HEADS = ("output", "nextn_shared_head_head")
# K-quants and their like; ggml's tiled kernels for x86 take them, from this version on, and pass by what is repacked. They win where
# a product has some tens of columns, rewritten weights where it has few: both are kept
TILED_SINCE, TILED_ON = (0, 25), ("AVX", "AVX2", "AVX512")
TILED = frozenset("q2_k q3_k q4_k q5_k q6_k iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs".split())


@dataclass(frozen=True)
class LoadPolicy:
    """`repack`: kinds of products whose weights are rewritten. `mmap`: what is not rewritten stays mapped, but for the kinds `copied`.

    `tiled`: types that ggml multiplies by tiles as they are stored; where `both` is set, they are kept beside the rewritten ones.
    `huge`: ask for huge pages. `why`: the reasons of what was chosen here and not by the caller.
    """

    repack: frozenset[str]
    tiled: frozenset[str]
    both: bool
    mmap: bool
    copied: frozenset[str]
    huge: bool
    why: str

    def repacks(self, decl: Decl) -> bool:
        """Say whether a weight is to be rewritten, where the device has a layout for its type."""
        return kind_of(decl) in self.repack

    def keeps(self, type_name: str) -> bool:
        """Say whether a weight that is rewritten is kept as it is stored too."""
        return self.both and type_name in self.tiled

    def maps(self, decl: Decl, beside: bool) -> bool:
        """Say whether a weight as it is stored stays in the mapped file; `beside` a rewritten one it is not read at every step."""
        return self.mmap and (beside or kind_of(decl) not in self.copied)


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
    why, mapped, copied, tiled = [], mmap is True, frozenset(), _tiled(version, features)
    if mmap == "auto":
        mapped = nbytes > SMALL
        copied = EVERY_STEP if mapped else copied
        rest = "mapped but for what every step reads whole" if mapped else f"copied: below {SMALL >> 20} MiB a moment's work"
        why.append(f"{rest}; a copy lies in huge pages")
    if repack == "auto":
        kinds = EVERY_STEP
        why.append("what every step reads whole is repacked, where ggml has a layout for it")
        if tiled:
            why.append(f"K-quants and IQ types are kept as stored too, as ggml {version} multiplies many tokens faster with them")
    elif isinstance(repack, bool):
        kinds = frozenset(KINDS if repack else ())
    else:
        kinds = frozenset(repack.split("+") if isinstance(repack, str) else ())
        if not kinds or not kinds <= set(KINDS):
            raise OptionError(f"repack is {repack!r}, expected True, False, 'auto' or kinds of {'+'.join(KINDS)}")
    return LoadPolicy(kinds, tiled, repack == "auto", mapped, copied, nbytes <= total_memory(), "; ".join(why))


def _tiled(version: str, features: Collection[str]) -> frozenset[str]:
    """Return the types whose stored weights this ggml multiplies fastest with many columns; docs/log.md has the figures."""
    number = tuple(int(part) for part in version.split("-")[0].split(".")[:2])
    return TILED if number >= TILED_SINCE and not set(TILED_ON).isdisjoint(features) else frozenset()
