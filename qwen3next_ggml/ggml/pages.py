"""Ask the system for huge pages behind memory that ggml allocated (level 1)."""

from __future__ import annotations

import ctypes
import mmap

_PAGE = mmap.PAGESIZE


def advise_huge_pages(address: int, size: int) -> bool:
    """Let the system use huge pages for [address, address + size) when it is touched; False where it has none to give.

    Only whole pages inside the range are meant, so neighbours in the heap keep theirs.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start, end = -(-address // _PAGE) * _PAGE, (address + size) // _PAGE * _PAGE
    if advice is None or end <= start:
        return False
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice) == 0
