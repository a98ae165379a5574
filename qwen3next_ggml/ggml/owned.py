"""Owners of native memory: freed once, by whoever comes first, never while a computation may still read it (level 1).

At exit the running computations are stopped, then everything still open is freed, youngest first.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable

from ._native import lib

_PATIENCE = 10.0  # seconds to wait at exit for a device that cannot be stopped

_open: weakref.WeakSet[Owned] = weakref.WeakSet()


class Owned:
    """Something with `close()`, a context manager; freed by the collector or at exit when nobody closed it."""

    __slots__ = ("__weakref__", "_free")

    def _own(self, free: Callable[..., object], *kept: object) -> None:
        """Call `free(*kept)` once; the objects in `kept` live at least that long."""
        self._free = weakref.finalize(self, free, *kept)
        _open.add(self)

    @property
    def closed(self) -> bool:
        return not self._free.alive

    def close(self) -> None:
        """Free the native memory. Closing twice does nothing."""
        self._free()

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _settle() -> None:
    """Stop what runs in threads that outlive the interpreter; what cannot be stopped keeps its memory."""
    lib.q_stop_all()
    patience = time.monotonic() + _PATIENCE
    while lib.q_n_running() and time.monotonic() < patience:
        time.sleep(0.005)
    if lib.q_n_running():
        for owner in _open:
            owner._free.atexit = False


# exit handlers run last come, first served: the first finalizer registers the one that frees, so _settle runs before it
weakref.finalize(Owned, int)
atexit.register(_settle)
